"""`rftdask serve`: a session whose reward was answered with 200 is in the log exactly once, whatever is killed."""

import asyncio
import contextlib
import datetime
import http.client
import io
import ipaddress
import json
import re
import ssl
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from PIL import Image

from rftdask import Experiment
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log import open_log
from rftdask.config import load_config
from rftdask.data.images import data_url, name_of
from rftdask.errors import UserError
from rftdask.models.toy import build_toy_image_model
from rftdask.storage import open_storage
from tests.integration import run_cases as runs
from tests.unit.synchronizer.sync_cases import publish_weights

pytestmark = pytest.mark.slow
TOKEN = "a-token"
NUM_CLIENTS = 200
ENV = {"RFTDASK_SERVE_TOKEN": TOKEN}
PAGE = (Path(__file__).parents[3] / "docs/serve.md").read_text()


class Served:
    """A server that has printed its address."""

    def __init__(self, run: runs.RunProcess) -> None:
        assert run.process.stdout is not None
        self.run = run
        line = run.process.stdout.readline()
        assert line.startswith("serving http://127.0.0.1:"), line
        self.url = line.split()[1].removesuffix("/v1")

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def ask(self, session: str, said: str | list[Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": said}]
        status, answer = self.post(f"/sessions/{session}/v1/chat/completions", model="p", messages=messages)
        assert status == 200, answer
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    def health(self) -> dict[str, int]:
        with urllib.request.urlopen(self.url + "/health", timeout=60) as answer:
            return dict(json.loads(answer.read()))

    def version(self) -> int:
        return self.health()["policy_version"]


def serve(config: Path, *more: str) -> runs.RunProcess:
    return runs.RunProcess("serve", str(config), "--port", "0", *more, env=ENV)


def test_a_rewarded_session_outlives_kill_9_and_is_trained(config: Path) -> None:
    sessions = [
        (f"s{task}-{n}", f"task {task}", task + n / 10)
        for task in range(runs.BATCH_SIZE)
        for n in range(runs.REPEAT_TIMES)
    ]
    # Kill after one reward of each kind: the first of a group, and the last of one.
    for first, last in ((0, 3), (3, 4), (4, len(sessions))):
        with serve(config) as run:
            served = Served(run)
            for session, task, reward in sessions[first:last]:
                served.ask(session, task)
                status, told = served.post("/feedback", session_id=session, reward=reward, task_id=task)
                assert status == 200, told
            served.ask("unrewarded", "forgotten")
            if last == len(sessions):
                run.process.terminate()
                assert run.process.wait(60) == 0
                assert f"{runs.BATCH_SIZE} groups are in the log, 0 sessions wait" in run.process.stdout.read()  # type: ignore[union-attr]
            else:
                run.process.kill()
                run.process.wait(60)
                run.wait_for_no_survivors()
    storage = open_storage(str(runs.run_folder(config)))
    log = open_log(storage, load_config(config))
    rows = [row for name in log.shards() for row in log.read(name).to_pylist()]
    found = sorted((row["task_index"], round(row["reward"], 4)) for row in rows)
    assert found == [(int(reward), round(reward, 4)) for _, _, reward in sessions]
    assert all(row["prompt_text"].startswith("task ") and len(row["tokens"]) > row["prompt_length"] for row in rows)
    ended = runs.call_cli("run", str(config), "mode=train", "trainer.total_steps=1", "--progress", "none")
    assert ended.code == 0, ended
    status = runs.assert_sound(runs.run_folder(config))
    assert status["sealed"] and status["experiences"]["committed"] == len(sessions)
    entry = Ledger(storage).read(1)
    assert entry is not None and sum(len(used.rows) for used in entry.use) == len(sessions)


def use(served: Served, number: int) -> bool:
    """Use session `number` and reward it. Returns True if the reward was answered with 200."""
    session, task = f"s{number}", f"task {number // runs.REPEAT_TIMES}"
    try:
        served.post(f"/sessions/{session}/v1/chat/completions", model="p", messages=[{"role": "user", "content": task}])
        return served.post("/feedback", session_id=session, reward=number, task_id=task)[0] == 200
    except (OSError, http.client.HTTPException):  # the server is gone
        return False


def test_rewarded_sessions_are_logged_once_despite_kills(tmp_path: Path) -> None:
    config, num_steps_in_all, per_step = runs.write_config(tmp_path), 3, runs.BATCH_SIZE * runs.REPEAT_TIMES
    folder = runs.run_folder(config)
    settings = (
        "mode=train",
        f"trainer.total_steps={num_steps_in_all}",
        "trainer.save_interval=1",
        "--progress",
        "plain",
    )
    rewarded = set[int]()
    with runs.RunProcess("run", str(config), *settings) as trainer:
        with serve(config) as run:
            served = Served(run)
            rewarded |= {number for number in range(per_step) if use(served, number)}
            assert len(rewarded) == per_step
            trainer.wait_until(lambda: runs.num_steps(folder) == 1)
            [rank] = trainer.children(runs.TRAINER)
            rank.kill()
            trainer.wait_until(
                lambda: rank not in trainer.children(runs.TRAINER) and bool(trainer.children(runs.TRAINER))
            )
            # Its engine dies between an answer and its reward; the reward may then be answered with 200.
            served.ask(f"s{per_step}", "1")
            [engine] = run.children(runs.ENGINE)
            engine.kill()
            rewarded |= {number for number in range(per_step, per_step + 3) if use(served, number)}
            ended = run.end()
            assert ended.code != 0 and "has died; run the same command again to continue" in ended.err, ended
            run.wait_for_no_survivors()
        with serve(config) as run:
            served = Served(run)
            for number in rewarded:
                assert served.post("/feedback", session_id=f"s{number}", reward=number)[0] == 200, "it was lost"
            later = [number for number in range(2 * per_step) if number not in rewarded]
            assert all(use(served, number) for number in later)
            trainer.wait_until(lambda: runs.num_steps(folder) == 2)
            trainer.kill()
            trainer.wait_for_no_survivors()
            assert all(use(served, number) for number in range(2 * per_step, num_steps_in_all * per_step))
            with runs.RunProcess("run", str(config), *settings) as again:
                again.end(code=0)
            run.process.terminate()
            assert run.process.wait(60) == 0
    log = open_log(open_storage(str(folder)), load_config(config))
    sessions = Counter((row["session"], row["reward"]) for name in log.shards() for row in log.read(name).to_pylist())
    assert sessions == {(f"s{number}", float(number)): 1 for number in range(num_steps_in_all * per_step)}
    status = runs.assert_sound(folder)
    assert status["step"] == num_steps_in_all and status["experiences"]["trained"] == len(sessions)


def test_second_server_of_a_run_is_refused(config: Path) -> None:
    with serve(config) as run:
        served = Served(run)
        with serve(config) as second:
            ended = second.end(code=2)
        assert "is in use: explorer is process" in ended.err and ended.err.count("\n") == 1, ended
        assert use(served, 0)


async def talk(url: str, path: str, body: dict[str, Any], kind: str) -> int:
    """Send a request and return the status of its answer.

    kind: "vanishing": closes the connection without waiting for the answer, and returns 0. "slow": sends and reads a
    few bytes at a time.
    """
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data
    try:
        if kind == "vanishing":
            # Some in the middle of the request, others after it.
            writer.write(request if len(path) % 2 else request[:-5])
            await writer.drain()
            return 0
        size = 40 if kind == "slow" else len(request)
        for start in range(0, len(request), size):
            writer.write(request[start : start + size])
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = b""
        while part := await reader.read(20 if kind == "slow" else 1 << 16):
            answer += part
        return int(answer.split()[1])
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def test_slow_and_vanishing_clients_cost_others_nothing(config: Path) -> None:
    kinds = ("slow", "vanishing", "usual", "vanishing after its answer")

    async def session(served: Served, number: int) -> int:
        kind = kinds[number % len(kinds)]
        body = {"model": "p", "messages": [{"role": "user", "content": f"task {number}"}], "stream": number % 3 == 0}
        while (status := await talk(served.url, f"/sessions/s{number}/v1/chat/completions", body, kind)) == 429:
            await asyncio.sleep(0.5)
        feedback = {"session_id": f"s{number}", "reward": number}
        if kind in ("slow", "usual"):
            assert status == 200
            assert await talk(served.url, "/feedback", feedback, kind) == 200
        elif kind != "vanishing":
            await talk(served.url, "/feedback", feedback, "vanishing")
        return status

    async def all_sessions(served: Served) -> None:
        await asyncio.gather(*(session(served, number) for number in range(NUM_CLIENTS)))

    with serve(config) as run:
        served = Served(run)
        asyncio.run(all_sessions(served))
        run.wait_until(lambda: served.health()["under_way"] == 0)
        rewarded = {number for number in range(NUM_CLIENTS) if number % len(kinds) in (0, 2)}
        # A reward whose client has gone may have been stored; repeating it shows which.
        rewarded |= {
            n
            for n in range(3, NUM_CLIENTS, len(kinds))
            if served.post("/feedback", session_id=f"s{n}", reward=n)[0] == 200
        }
        run.process.terminate()
        assert run.process.wait(60) == 0
    log = open_log(open_storage(str(runs.run_folder(config))), load_config(config))
    sessions = Counter((row["session"], row["reward"]) for name in log.shards() for row in log.read(name).to_pylist())
    assert sessions == {(f"s{number}", float(number)): 1 for number in rewarded}
    assert len(rewarded) == NUM_CLIENTS * 3 // 4


def test_newer_weights_are_served_and_turns_record_their_version(config: Path) -> None:
    with serve(config) as run:
        served = Served(run)
        said = served.ask("s", "1")
        storage = open_storage(str(runs.run_folder(config)))
        publish_weights(storage, 3, b"weights")
        run.wait_until(lambda: served.version() == 3)
        messages = [{"role": "user", "content": "1"}, said, {"role": "user", "content": "2"}]
        assert served.post("/sessions/s/v1/chat/completions", model="p", messages=messages)[0] == 200
        status, told = served.post("/feedback", session_id="s", reward=1)
        assert (status, told["policy_versions"]) == (200, [0, 3])
        use_as_the_page_shows(served)


def use_as_the_page_shows(served: Served) -> None:
    """Run the Python code of docs/serve.md with an agent that makes one request; a rejected reward raises."""
    [shown] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    ask = "agent.chat.completions.create(model='policy', messages=[{'role': 'user', 'content': 'hi'}])"
    assert "http://127.0.0.1:8000" in shown and "\n...  # " in shown
    names: dict[str, Any] = {"key": TOKEN}
    exec(shown.replace("http://127.0.0.1:8000", served.url).replace("\n...  # ", f"\n{ask}  # "), names)
    for client in (names["http"], names["agent"]):
        client.close()


def test_a_run_that_was_moved_is_served_where_it_is(config: Path, tmp_path: Path) -> None:
    with serve(config) as run:
        Served(run)
        run.process.terminate()
        assert run.process.wait(60) == 0
    moved = runs.run_folder(config).rename(tmp_path / "elsewhere")
    with serve(moved) as run:
        served = Served(run)
        served.ask("s", "1")
        assert served.post("/feedback", session_id="s", reward=1)[0] == 200
        run.wait_until(lambda: bool(open_log(open_storage(str(moved)), load_config(config)).shards()))
    assert not runs.run_folder(config).exists()


def test_a_server_with_a_certificate_speaks_only_https(tmp_path: Path) -> None:
    config, key = runs.write_config(tmp_path), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    refused = runs.call_cli("serve", str(config), "--tls-cert", str(cert_file))
    assert refused.code == 2 and "--tls-key ''" in refused.err, refused
    with serve(config, "--tls-cert", str(cert_file), "--tls-key", str(key_file)) as run:
        assert run.process.stdout is not None
        url = run.process.stdout.readline().split()[1]
        assert url.startswith("https://127.0.0.1:")
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(verify=ssl.create_default_context(cafile=str(cert_file)), headers=headers) as client:
            assert client.get(f"{url}/models").json()["data"][0]["id"] == "policy"
            # Like a third-party program: with the key of one session, valid only for that session.
            session = client.post(f"{url.removesuffix('/v1')}/sessions", json={}).json()
            asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            with openai.OpenAI(base_url=url, api_key=session["api_key"], http_client=client) as agent:
                assert agent.chat.completions.create(**asked).choices[0].message.role == "assistant"
                told = {"reward": 1, "session_id": session["session_id"]}
                assert client.post(f"{url.removesuffix('/v1')}/feedback", json=told).json()["num_rows"] == 1
            with httpx.Client(verify=ssl.create_default_context(cafile=str(cert_file))) as other:
                stranger = openai.OpenAI(base_url=url, api_key="another", http_client=other, max_retries=0)
                with pytest.raises(openai.AuthenticationError):
                    stranger.chat.completions.create(**asked)
        with pytest.raises(httpx.ConnectError, match="self-signed certificate"):
            httpx.get(f"{url}/models")
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{url}/models".replace("https", "http"))


def test_a_served_model_that_reads_images_trains_on_them(tmp_path: Path) -> None:
    build_toy_image_model(tmp_path / "model")
    tree = {
        "mode": "serve",
        "name": "seeing",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "model": {"model_path": str(tmp_path / "model"), "max_prompt_tokens": 64, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2, "kl_loss_fn": "none"},
        "buffer": {"batch_size": 1},
        "explorer": {"rollout_model": {"engine_type": "transformers"}, "proxy_port": 0},
        "cluster": {"num_cpus": 2},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    buffer = io.BytesIO()
    Image.new("RGB", (56, 28), (9, 9, 200)).save(buffer, format="PNG")
    name = name_of(buffer.getvalue())
    image = {"type": "image_url", "image_url": {"url": data_url(buffer.getvalue())}}
    with runs.RunProcess("run", str(config), env=ENV) as run:
        served = Served(run)
        for number in range(2):
            served.ask(f"s{number}", [{"type": "text", "text": "what? "}, image])
            assert served.post("/feedback", session_id=f"s{number}", reward=number, task_id="t")[0] == 200
        run.process.terminate()
        assert run.process.wait(60) == 0
    folder = tmp_path / "runs" / "rftdask" / "seeing"
    assert [file.name for file in (folder / "media").iterdir()] == [name]
    ended = runs.call_cli("run", str(config), "mode=train", "trainer.total_steps=1", "--progress", "none")
    assert ended.code == 0, ended
    runs.assert_sound(folder)
    steps = Experiment.open(folder).metrics("trainer")
    assert len(steps) == 1 and steps.grad_norm[0] > 0 and abs(steps.mismatch_kl[0]) < 1e-6


def test_mode_serve_is_served_by_run_and_needs_no_tasks(config: Path) -> None:
    tree = yaml.safe_load(config.read_text())
    del tree["buffer"]["explorer_input"]
    tree["explorer"]["proxy_port"] = 0
    config.write_text(yaml.safe_dump({**tree, "mode": "serve"}))
    assert runs.call_cli("validate", str(config)).code == 0
    with runs.RunProcess("run", str(config), env=ENV) as run:
        assert Served(run).ask("s", "hi")["role"] == "assistant"
        run.process.terminate()
        assert run.process.wait(60) == 0
    with pytest.raises(UserError, match="mode serve never ends"):
        Experiment.from_yaml(config).run()
