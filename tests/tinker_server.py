"""A small server for the protocol of the Tinker service (tinker 0.38), with a toy model on the CPU.

It trains all weights of the model instead of an adapter, samples token by token, and returns a result only when it is
requested for the second time, like a busy service. Saved states are named by their content, so equal paths mean equal
weights. Everything is in memory and in one thread, in the order of the requests.

    with served() as server:
        ServiceClient(base_url=server.url, api_key="tml-test")
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as pb
from transformers import AutoModelForCausalLM

_START_S = 30.0


class Trained:
    """A model in training, with its AdamW."""

    def __init__(self, base_model: str, model: torch.nn.Module) -> None:
        self.base_model, self.model = base_model, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        self.last_request = 0

    def copied(self) -> Trained:
        made = Trained(self.base_model, copy.deepcopy(self.model))
        made.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return made

    def digest(self, *, with_optimizer: bool) -> str:
        tensors = list(self.model.state_dict().values())
        if with_optimizer:
            state = self.optimizer.state_dict()["state"]
            tensors += [value for key in sorted(state) for _, value in sorted(state[key].items())]
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


class TinkerServer:
    """url: its address; requests: (route, body) of all requests; saved: saved states by path."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, Any]] = []
        self.saved: dict[str, Trained] = {}
        self.is_stuck = False
        """If true, it accepts requests and returns no results."""
        self.refuses_deletes = False
        self._bases: dict[str, Trained] = {}
        self._training: dict[str, Trained] = {}
        self._samplers: dict[str, Trained] = {}
        self._results: dict[str, bytes | dict[str, Any]] = {}
        self._asked: set[str] = set()
        self._numbers = itertools.count(1)

    def asked(self, route: str) -> list[Any]:
        return [body for each, body in self.requests if each == route]

    def app(self) -> Starlette:
        posts = {name: getattr(self, f"_{name.replace('/', '_')}") for name in _POSTS}

        async def post(request: Request) -> Response:
            name, data = request.path_params["name"], await request.body()
            if not request.headers.get("x-api-key", "").startswith("tml-test"):
                return JSONResponse({"detail": "the key is not known"}, 401)
            body: Any = data if name == "forward_backward" else await request.json() if data else {}
            self.requests.append((name, body))
            if name == "retrieve_future":
                return await self._retrieve(body)
            try:
                return JSONResponse(posts[name](body))
            except Exception as error:  # report errors of this server at once: clients would retry a 500 for minutes
                return JSONResponse({"detail": f"{name}: {type(error).__name__}: {error}"}, 422)

        async def sampler(request: Request) -> Response:
            number = request.path_params["number"]
            return JSONResponse({"sampler_id": number, "base_model": self._samplers[number].base_model})

        async def delete(request: Request) -> Response:
            path = "tinker://{run}/{kind}/{name}".format(**request.path_params)
            self.requests.append(("delete", path))
            if self.refuses_deletes:
                return JSONResponse({"detail": "it is kept"}, 403)
            del self.saved[path]
            return Response(status_code=204)

        at = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
        return Starlette(
            routes=[
                Route(at, delete, methods=["DELETE"]),
                Route("/api/v1/samplers/{number}", sampler),
                Route("/api/v1/{name:path}", post, methods=["POST"]),
            ]
        )

    async def _retrieve(self, body: Any) -> Response:
        number = body["request_id"]
        if self.is_stuck:
            await asyncio.sleep(0.1)
        if self.is_stuck or number not in self._asked:
            self._asked.add(number)
            told = {"type": "try_again", "request_id": number, "queue_state": "active"}
            return JSONResponse(told, 408)
        result = self._results[number]
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)

    def _promise(self, result: bytes | dict[str, Any], **more: Any) -> dict[str, Any]:
        number = f"request-{next(self._numbers)}"
        self._results[number] = result
        return {"request_id": number, **more}

    # ---- sessions

    def _client_config(self, body: Any) -> dict[str, Any]:
        return {}

    _client_dynamic_config = _session_heartbeat = _client_config

    def _create_session(self, body: Any) -> dict[str, Any]:
        return {"session_id": f"session-{next(self._numbers)}"}

    # ---- training

    def _base(self, name: str) -> Trained:
        if name not in self._bases:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
            self._bases[name] = Trained(name, model)
        return self._bases[name]

    def _create_model(self, body: Any) -> dict[str, Any]:
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        try:
            self._training[model_id] = self._base(body["base_model"]).copied()
        except OSError as error:
            return self._promise({"error": f"no such model: {error}", "category": "user"})
        return self._promise({"model_id": model_id})

    def _get_info(self, body: Any) -> dict[str, Any]:
        own = self._training[body["model_id"]]
        return {"model_id": body["model_id"], "model_data": {"model_name": own.base_model}, "is_lora": True}

    def _next(self, model_id: str, number: int) -> Trained:
        own = self._training[model_id]
        assert number == own.last_request + 1, f"request {number} after {own.last_request}"
        own.last_request = number
        return own

    def _forward_backward(self, data: bytes) -> dict[str, Any]:
        request = pb.ForwardBackwardRequest()
        request.ParseFromString(data)
        own = self._next(request.model_id, request.seq_id)
        assert request.loss_fn == "cross_entropy"
        rows, loss = [], torch.zeros(())
        for datum in request.data:
            [chunk] = datum.model_input
            tokens = torch.tensor(np.frombuffer(chunk.encoded_text.tokens, np.int32).astype(np.int64))
            targets, weights = (datum.loss_fn_inputs[key].dense for key in ("target_tokens", "weights"))
            logprobs = _logprobs(own.model, tokens, torch.tensor(np.frombuffer(targets, np.int64).copy()))
            loss = loss - (logprobs * torch.tensor(np.frombuffer(weights, np.float32).copy())).sum()
            rows.append(logprobs.detach().numpy())
        if not request.forward_only:
            loss.backward()
        ends = np.cumsum([0, *(4 * len(row) for row in rows)], dtype=np.int64)
        tensor = pb.BatchedTensor(
            data=np.concatenate(rows).astype(np.float32).tobytes(), offsets=ends.tobytes(), dtype=pb.DTYPE_FLOAT32
        )
        record = pb.ArrayRecord(fields={"logprobs": tensor}, num_datums=len(rows))
        output = pb.ForwardBackwardOutput(
            loss_fn_output_type="CrossEntropy", loss_fn_outputs=[record], metrics={"loss:sum": float(loss.detach())}
        )
        return self._promise(output.SerializeToString())

    def _optim_step(self, body: Any) -> dict[str, Any]:
        own, params = self._next(body["model_id"], body["seq_id"]), body["adam_params"]
        [group] = own.optimizer.param_groups
        group.update(
            lr=params["learning_rate"],
            betas=(params["beta1"], params["beta2"]),
            eps=params["eps"],
            weight_decay=params["weight_decay"],
        )
        if params["grad_clip_norm"] > 0:
            torch.nn.utils.clip_grad_norm_(own.model.parameters(), params["grad_clip_norm"])
        own.optimizer.step()
        own.optimizer.zero_grad()
        return self._promise({})

    # ---- saved states

    def _save(self, body: Any, kind: str, own: Trained) -> dict[str, Any]:
        path = f"tinker://{own.digest(with_optimizer=kind == 'weights')}/{kind}/{body['path']}"
        self.saved[path] = own.copied()
        return self._promise({"path": path})

    def _save_weights(self, body: Any) -> dict[str, Any]:
        return self._save(body, "weights", self._next(body["model_id"], body["seq_id"]))

    def _save_weights_for_sampler(self, body: Any) -> dict[str, Any]:
        return self._save(body, "sampler_weights", self._next(body["model_id"], body["seq_id"]))

    def _load_weights(self, body: Any) -> dict[str, Any]:
        assert body["optimizer"], "a run that goes on has its optimizer"
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        self._training[model_id] = self.saved[body["path"]].copied()
        return self._promise({"path": body["path"], "model_id": model_id})

    # ---- sampling

    def _create_sampling_session(self, body: Any) -> dict[str, Any]:
        number = f"sampler-{next(self._numbers)}"
        path = body.get("model_path")
        self._samplers[number] = self._base(body["base_model"]) if path is None else self.saved[path]
        return {"sampling_session_id": number}

    @torch.no_grad()
    def _asample(self, body: Any) -> dict[str, Any]:
        model, params = self._samplers[body["sampling_session_id"]].model, body["sampling_params"]
        tokens = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        response = pb.SampleResponse()
        if body.get("prompt_logprobs"):
            known = _logprobs(model, torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])).numpy()
            known[: len(known) - (body.get("prompt_logprobs_last_n") or len(known))] = np.nan
            response.prompt_logprobs = np.array([np.nan, *known], np.float32).tobytes()
        random = torch.Generator().manual_seed(params.get("seed") or 0)
        end, sampled, logprobs = model.config.eos_token_id, list[int](), list[float]()
        while len(sampled) < params["max_tokens"] and end not in sampled:
            logits = model(input_ids=torch.tensor([[*tokens, *sampled]])).logits[0, -1].float()
            told = torch.log_softmax(logits / (params["temperature"] or 1.0), -1)
            drawn = torch.multinomial(told.exp(), 1, generator=random) if params["temperature"] else told.argmax()
            sampled.append(int(drawn))
            logprobs.append(float(told[sampled[-1]]))
        response.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if end in sampled else pb.STOP_REASON_LENGTH,
            tokens=np.array(sampled, np.int32).tobytes(),
            logprobs=np.array(logprobs, np.float32).tobytes(),
        )
        return self._promise(response.SerializeToString(), sample_sequence_ids=[f"sequence-{next(self._numbers)}"])


_POSTS = (
    *("client/config", "client/dynamic_config", "create_session", "session_heartbeat", "create_model", "get_info"),
    *("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights"),
    *("create_sampling_session", "asample"),
)


def _logprobs(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens[None]).logits[0].float()
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


@contextmanager
def served() -> Iterator[TinkerServer]:
    """Run a server in a thread of this process, on a free loopback port."""
    server = TinkerServer()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        running = uvicorn.Server(uvicorn.Config(server.app(), log_level="error"))
        thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
        thread.start()
        deadline = time.monotonic() + _START_S
        while not running.started:
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)
        try:
            yield server
        finally:
            running.should_exit = True
            thread.join(_START_S)
