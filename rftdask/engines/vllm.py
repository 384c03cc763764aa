"""Engine that generates with vLLM (0.26 to 0.32), on a CPU or on one or several GPUs.

vLLM runs in its own processes, to which an event loop in a thread of this process forwards requests. One guarantee of
`Engine` is weaker: which requests share a forward pass depends on time, so the same call twice gives the same tokens up
to rounding.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from transformers.utils.hub import cached_file

from rftdask.config import fill_from_environment
from rftdask.config.base import plain
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.data.images import ImageProcessor, check_reads_images
from rftdask.engines.base import MAX_BAD_TOKENS, MAX_BAD_WORDS, Engine, GenerateRequest, Generation, Give, Take
from rftdask.engines.transformers import end_ids
from rftdask.engines.vllm_follower import Nodes
from rftdask.errors import DataError, RoleError, UserError
from rftdask.models.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE, largest_rank
from rftdask.processes.device_lock import DEVICES_VARIABLE
from rftdask.processes.zygote import die_with_parent, socket_folder
from rftdask.storage.staging import staged
from rftdask.storage.temporary import TemporaryFolder
from rftdask.synchronizer.fingerprint import SEQUENCE_LENGTH

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

T = TypeVar("T")

ENGINE_PID = "RFTDASK_ENGINE_PID"
"""Environment variable with the pid of the engine process, with which vLLM's processes end."""
CAUSE_FILE = "RFTDASK_ENGINE_CAUSE"
"""Environment variable with the file for the first fatal error of vLLM's processes."""
MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0. Below it vLLM samples at this temperature."""
_LOOK_S = 0.005  # seconds between polls for new requests while others run: less than a step of any relevant model
_STOP_S = 10.0  # seconds for vLLM's tasks on the event loop to end
_FIRST = "default"  # version that vLLM reports until it is set
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # maximum LoRA ranks that vLLM supports

_CPU_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several processes share the cores; OMP_NUM_THREADS is set
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs Triton, which does not support CPUs; set here to avoid a warning of vLLM
}
_DEFAULTS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


class VllmEngine(Engine):
    """Engine of vLLM processes, which it starts and calls; see `Engine`.

    Args:
        model_path: folder or Hub name of a model that vLLM supports.
        dtype: data type of the weights: "float32", "bfloat16", "float16".
        device: "cpu" or "cuda"; must match the build of vLLM.
        max_model_len: maximum length of prompt plus response. None: the limit of the model.
        lora_rank: rank of the adapters that the trainer publishes. None: it publishes complete weights.
        engine_args: further arguments of AsyncEngineArgs, such as tensor_parallel_size; they override derived ones.
        nodes: nodes of its tensor and pipeline parallel parts. None: this node.
    Raises: UserError: vLLM is not installed or rejects its arguments; DataError: it cannot load the model.
    """

    engine_type = "vllm"
    required_package = "vllm"
    takes_dora = False
    max_lora_rank = 512  # the last of _LORA_RANKS
    loads_in_flight = True
    guides_sampling = True
    reads_images = True
    image_models = ("idefics3", "qwen2_vl", "qwen2_5_vl")  # other models may run other code than the trainer
    loads_adapters_in_flight = False  # running requests use their adapter, which is removed when another one is loaded
    leaves_device = True
    takes_share = True
    spans_nodes = True
    refused_args: ClassVar[Mapping[str, str]] = {
        "worker_extension_cls": "the engine loads weights by its own",
        "skip_tokenizer_init": "inputs and outputs are token ids",
        "structured_outputs_config": "grammars are applied as by engine transformers, with the same package",
    }
    refused_policy_args: ClassVar[Mapping[str, str]] = {
        "speculative_config": "it is not verified that speculative decoding preserves tokens and logprobs",
        "logprobs_mode": "logprobs must be those of softmax(logits / temperature), as in the trainer",
        "mm_device_do_normalize": "the trainer normalizes pixels with the processor of the model",
        "logits_processors": "the trainer ignores them and would train another policy than the one that sampled",
    }
    memory_keys = (
        "explorer.rollout_model.gpu_memory_utilization or model.max_model_len lower, or more GPUs for an engine "
        "(explorer.rollout_model.tensor_parallel_size)"
    )
    config_keys = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "gpu_memory_utilization",
        "extra_engine_args",
    )

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
        max_model_len: int | None = None,
        lora_rank: int | None = None,
        engine_args: Mapping[str, Any] | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        set_defaults(on_cpu=device == "cpu")
        os.environ[ENGINE_PID] = str(os.getpid())  # for vLLM's processes, which import vllm_worker.py
        self.model_path = model_path
        # Data type for the fingerprint: 8-bit weights are derived from the published ones.
        eight_bits = (str((engine_args or {}).get(key)).startswith("fp8") for key in ("quantization", "kv_cache_dtype"))
        self.dtype = "fp8" if any(eight_bits) else dtype
        self._args: dict[str, Any] = {
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "max_model_len": max_model_len,
            # Token ids in and out; the tokenizer is only for grammars, and a model may have none.
            "skip_tokenizer_init": Path(model_path).is_dir()
            and not Path(model_path, "tokenizer_config.json").is_file(),
            # Applies grammars to the complete response, including reasoning, as engine transformers does.
            "structured_outputs_config": {"backend": "guidance", "enable_in_reasoning": True},
            # Ignores the sampling defaults in the files of the model.
            "generation_config": "vllm",
            "disable_log_stats": True,
            # The cache would refer to an image that a process has just dropped.
            "mm_processor_cache_gb": 0,
            "worker_extension_cls": "rftdask.engines.vllm_worker.WeightWorker",
            **(_lora_args(lora_rank) if lora_rank else {}),
            **(engine_args or {}),
        }
        self._sleeps = device != "cpu" and DEVICES_VARIABLE in os.environ  # shares its GPUs with a trainer
        self._lacks_cache = False  # only the weights are back on its GPUs
        if self._sleeps:
            self._args["enable_sleep_mode"] = True
        if device == "cpu":
            self._args["enforce_eager"] = True  # compiling takes minutes there
            # For a prompt in chunks vLLM resets the generator, which fails on a CPU.
            self._args["enable_chunked_prefill"] = False
        try:
            self._end_ids = end_ids(model_path, trust_remote_code)
        except (OSError, ValueError) as error:
            raise DataError(f"model {model_path} cannot be loaded; give a saved model's folder: {error}") from error
        self._nodes, self._on_cpu = nodes, device == "cpu"
        # On storage that all of its nodes share.
        self._folder = TemporaryFolder("vllm", str(nodes.folder) if nodes else None)
        self._cause_file = Path(self._folder.name) / "cause"
        os.environ[CAUSE_FILE] = str(self._cause_file)
        self._images = ImageProcessor(model_path, trust_remote_code=trust_remote_code)
        self._num_requests = self._num_adapters = 0
        self._adapter: LoRARequest | None = None
        self._running: AsyncLLM | None = None
        self._loop = asyncio.new_event_loop()
        # The async client of vLLM must stay on one event loop; `serve` blocks the thread of its caller.
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._start(model_path)

    @classmethod
    def from_config(cls, section: InferenceModelConfig, model: ModelConfig, device: str) -> VllmEngine:
        """See Engine. A frozen model loads no weights, so it reserves no space for fingerprints and adapters."""
        own_names = {key: getattr(section, key) for key in cls.config_keys if key != "extra_engine_args"}
        policy = section.model_path is None  # otherwise a frozen model, which is neither trained nor verified
        return cls(
            section.model_path or model.model_path,
            dtype=section.dtype,
            device=device,
            trust_remote_code=model.trust_remote_code,
            # Room for the fingerprint: its sequences plus the one token that vLLM must sample after each.
            # -1: as long as model and cache allow; otherwise vLLM starts only if the longest sequence fits the cache.
            max_model_len=max(model.max_model_len, SEQUENCE_LENGTH + 1) if policy else section.max_model_len or -1,
            lora_rank=largest_rank(model.lora_configs[0]) if policy and model.lora_configs else None,
            engine_args=own_names | plain(fill_from_environment(section.extra_engine_args)),
            nodes=Nodes.of_this_process() if policy else None,
        )

    def serve(self, take: Take, give: Give) -> None:
        finished: SimpleQueue[Future[Generation]] = SimpleQueue()
        under_way: dict[Future[Generation], int] = {}
        self._make_cache()
        try:
            while True:
                # At most one result between polls, so that requests of one poll enter the batch together.
                unwanted = set()
                for number, request in take():
                    if request is None:
                        unwanted.add(number)
                        continue
                    if 0 < request.sampling.temperature < MIN_TEMPERATURE:
                        raise RoleError(
                            f"{self} cannot answer request {number}: temperature is {request.sampling.temperature}, "
                            f"must be 0 (greedy) or at least {MIN_TEMPERATURE}"
                        )
                    future = self._submit(self._generate(request))
                    under_way[future] = number
                    future.add_done_callback(finished.put)
                for future in [future for future, number in under_way.items() if number in unwanted]:
                    del under_way[future]
                    future.cancel()  # vLLM then aborts it
                if not under_way:
                    return
                with contextlib.suppress(Empty):
                    future = finished.get(timeout=_LOOK_S)
                    if future in under_way:  # otherwise it was cancelled
                        number = under_way.pop(future)
                        give(number, self._result(future, f"request {number}"))
        finally:
            for future in under_way:
                future.cancel()

    async def _generate(self, request: GenerateRequest) -> Generation:
        from vllm import SamplingParams  # late: see _start
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sampling = request.sampling
        version = self.policy_version
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_tokens=sampling.min_tokens,
            repetition_penalty=sampling.repetition_penalty,
            ignore_eos=True,  # it may know fewer end tokens
            stop_token_ids=[] if sampling.ignore_eos else self._end_ids,
            seed=_mixed(request.seed),
            structured_outputs=StructuredOutputsParams(grammar=sampling.grammar) if sampling.grammar else None,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY if request.on_tokens is None else RequestOutputKind.DELTA,
        )
        # vLLM derives them from words; here they are token ids.
        params._bad_words_token_ids = [list(tokens) for tokens in sampling.bad_tokens] or None
        tokens, logprobs, reason = list[int](), list[float](), None
        seen = await self._read_images(request) if request.images else None
        async for output in self._ask(request.prompt_tokens, params, seen):
            [answer] = output.outputs
            tokens += answer.token_ids
            if (found := answer.logprobs) is not None:
                # Those of a token begin with the sampled one.
                logprobs += (found.logprobs[start] for start in found.start_indices)
            reason = answer.finish_reason
            if request.on_tokens is not None and reason is None:
                request.on_tokens(tuple(answer.token_ids))
        if reason == "error" and sampling.is_guided and tokens and tokens[-1] in self._end_ids:
            reason = "stop"  # bad_tokens left only an end token, which the grammar does not know
        if reason not in ("stop", "length") or len(logprobs) != len(tokens):
            raise RoleError(f"{self} ended a request with {reason!r} after {len(tokens)} tokens")
        if not all(map(math.isfinite, logprobs)):
            raise RoleError(
                f"{self} computed logits that are not numbers; the weights are damaged or training diverged"
            )
        answered = Generation(tuple(tokens), tuple(logprobs), reason, version, self.policy_version)
        # Missing in vLLM before 0.32. Until the first load vLLM reports its initial version.
        spans = getattr(answer, "weight_versions", None) or ()
        starts = [(span.start, version if span.version == _FIRST else int(span.version)) for span in spans]
        return answered.sampled_by(starts) if starts else answered

    def logprobs(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        """See Engine. vLLM also samples one token after each pair, which is discarded."""
        from vllm import SamplingParams  # late: see _start
        from vllm.sampling_params import RequestOutputKind

        async def score(prompt: tuple[int, ...], response: tuple[int, ...]) -> tuple[float, ...]:
            if not prompt or not response:
                raise RoleError(f"{self} cannot score: an empty prompt or response")
            [output] = [output async for output in self._ask((*prompt, *response), sampling)]
            found = output.prompt_logprobs  # position -> token -> logprob
            return tuple(found[place][token].logprob for place, token in enumerate(response, len(prompt)))

        async def score_all() -> list[tuple[float, ...]]:
            return list(await asyncio.gather(*(score(prompt, response) for prompt, response in pairs)))

        self._make_cache()
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return self._run(score_all(), f"scoring {len(pairs)} responses")

    @property
    def _llm(self) -> AsyncLLM:
        if self._running is None:
            raise RoleError(f"{self} was closed; make a new one")
        return self._running

    async def _read_images(self, request: GenerateRequest) -> Mapping[str, Any]:
        """Prompt for vLLM, which tokenizes images itself. Raises: RoleError: it creates other tokens."""

        def unread() -> Mapping[str, Any]:
            # Checked again here, since the model may not be on the machine that checked the run.
            check_reads_images(self.model_path, self.image_models)
            return {
                "prompt_token_ids": self._images.with_placeholders(request.prompt_tokens, request.images),
                "multi_modal_data": {"image": [self._images.picture(name) for name in request.images]},
                "multi_modal_uuids": {"image": list(request.images)},
            }

        seen: Mapping[str, Any]
        [seen] = await self._llm.renderer.render_cmpl_async([await asyncio.to_thread(unread)])
        if tuple(seen["prompt_token_ids"]) != request.prompt_tokens:
            raise RoleError(
                f"{self} makes other tokens of the images of a prompt than the processor that comes with the model, so "
                "what it samples could not be trained; use engine_type transformers"
            )
        return seen

    def _ask(
        self, tokens: Sequence[int], sampling: object, seen: Mapping[str, Any] | None = None
    ) -> AsyncIterator[RequestOutput]:
        # Outputs of one request, which shares cached prefixes only with requests of the same weights.
        from vllm.inputs import tokens_input  # late: see _start

        self._num_requests += 1
        # The salt is part of the cache key, so keys and values of older weights are never reused.
        prompt = {**(seen or tokens_input(list(tokens))), "cache_salt": f"version-{self.policy_version}"}
        number = str(self._num_requests)
        outputs: AsyncIterator[RequestOutput] = self._llm.generate(prompt, sampling, number, lora_request=self._adapter)
        return outputs

    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        """See Engine. Running requests continue with the new weights: vLLM recomputes their keys and values."""
        self._run(self._load(version, files), f"loading version {version}")
        self.policy_version = version

    async def _load(self, version: int, files: Sequence[Path]) -> None:
        missing = [str(file) for file in files if not file.is_file()]
        if missing:
            raise RoleError(f"{self} cannot load version {version}: no such file: {', '.join(missing)}")
        by_name = {file.name: file for file in files}
        # "keep": running requests continue with the new weights. The caches are cleared, so their tokens are
        # recomputed; logprobs and versions still record the weights that sampled them.
        await self._llm.pause_generation(mode="keep")
        if ADAPTER_FILE not in by_name:
            await self._llm.collective_rpc("load_published", args=([str(file) for file in files],))
        else:
            from vllm.lora.request import LoRARequest  # late: see _start

            self._num_adapters += 1
            folder = Path(self._folder.name) / f"adapter-{self._num_adapters}"
            folder.mkdir()
            for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
                shutil.copyfile(by_name[name], folder / name)  # vLLM may read them again
            adapter = LoRARequest(folder.name, self._num_adapters, str(folder))
            await self._llm.add_lora(adapter)
            # The new adapter is loaded before the old one is removed: vLLM holds two on the CPU (max_cpu_loras).
            former, self._adapter = self._adapter, adapter
            if former is not None:
                await self._llm.remove_lora(former.lora_int_id)
                shutil.rmtree(former.lora_path)
        if hasattr(self._llm, "update_weight_version"):
            await self._llm.update_weight_version(str(version))
        await self._llm.resume_generation()

    def load_anew(self, version: int, files: Sequence[Path]) -> None:
        """Restart vLLM with these weights in the model folder, which takes a minute. Running requests are lost."""
        if any(file.name == ADAPTER_FILE for file in files):
            self._start(self.model_path)
            self.load_weights(version, files)
            return
        folder = Path(self._folder.name) / f"version-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        source = Path(self.model_path)
        if not source.is_dir():  # a Hub name: vLLM has fetched its files into one folder
            source = Path(str(cached_file(self.model_path, "config.json"))).parent
        for path in source.iterdir():
            if path.is_file() and path.suffix not in (".safetensors", ".bin") and ".index." not in path.name:
                # Links, so that the folder is small; removed with this process.
                (folder / path.name).symlink_to(path.resolve())
        for number, file in enumerate(files, 1):
            (folder / f"model-{number:05}-of-{len(files):05}.safetensors").symlink_to(file.resolve())
        self._start(str(folder))
        self.policy_version = version

    def leave_device(self) -> None:
        """Move weights to host memory and drop the cache (sleep level 1 of vLLM)."""
        if self._sleeps:
            self._run(self._llm.sleep(level=1), "leaving its GPU")

    def return_to_device(self) -> None:
        """Restore only the weights: usually newer ones are loaded next, which may need the memory of the cache."""
        if self._sleeps:
            self._run(self._llm.wake_up(tags=["weights"]), "returning to its GPU")
            self._lacks_cache = True

    def _make_cache(self) -> None:
        if self._lacks_cache:
            self._run(self._llm.wake_up(tags=["kv_cache"]), "making room for keys and values")
            self._lacks_cache = False

    def _start(self, model_path: str) -> None:
        try:
            # Late: vLLM is optional, takes ten seconds to import, and reads environment variables set in __init__.
            from vllm import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise UserError(f"engine_type vllm needs vLLM: pip install 'rftdask[vllm]' ({error})") from error
        self._stop()
        # The first failing process writes it once; a file of an earlier start would name the wrong cause.
        self._cause_file.unlink(missing_ok=True)
        self._lacks_cache = False
        given = {"model": model_path, **self._args}
        if hasattr(AsyncEngineArgs, "mm_device_do_normalize"):
            # The processor of the model normalizes pixels, as in the trainer; vLLM may not normalize by default.
            given.setdefault("mm_device_do_normalize", False)
        if self._nodes is not None:
            given = self._nodes.begin(given, on_cpu=self._on_cpu)
        try:
            args = AsyncEngineArgs(**given)
        except TypeError as error:
            raise UserError(f"explorer.rollout_model.extra_engine_args: rejected by vLLM: {error}") from error

        async def start() -> AsyncLLM:
            # As many sequences at once as suit the GPU, by vLLM's own table (1,024 on one of 80 GB, otherwise 128).
            return AsyncLLM.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)

        try:
            self._running = asyncio.run_coroutine_threadsafe(start(), self._loop).result()
        except (ValueError, OSError, RuntimeError) as error:
            raise DataError(f"vLLM cannot serve model {model_path}: {self._cause() or error}") from error
        self.cache_tokens = cache_tokens(self._running.vllm_config)
        tempered = self._llm.collective_rpc("use_tempered_logprobs", args=(self._end_ids,))
        if not all(self._run(tempered, "its first call")):
            raise RoleError(f"{self} does not use vLLM's sampler, so its logprobs cannot be verified")

    def _run(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return self._result(self._submit(work), what)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._running is None:
            work.close()  # otherwise Python warns about a coroutine that is never awaited
            raise RoleError(f"{self} was closed; make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _result(self, future: Future[T], what: str) -> T:
        try:
            return future.result()
        except RoleError:
            raise
        except Exception as error:  # of any type: all mean that the engine has failed
            reason = error.__cause__ or error  # the message of the error may be empty
            cause = self._cause() or f"{type(reason).__name__}: {reason}"
            raise RoleError(f"{self} failed on {what}: {cause}") from error

    def _cause(self) -> str:
        # Reason why the processes of vLLM ended, which vLLM does not report. "": unknown.
        try:
            return self._cause_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _stop(self) -> None:
        async def shut_down(llm: AsyncLLM) -> None:
            llm.shutdown()
            # vLLM's pipe readers on this loop never end.
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=_STOP_S)

        if self._running is not None:
            self._run(shut_down(self._running), "its end")
        # Only the processes that loaded an adapter know it.
        self._running = self._adapter = None

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()  # nothing is left to run
        self._loop.close()
        self._folder.cleanup()

    def __str__(self) -> str:
        return f"engine 'vllm' ({self.model_path}, policy version {self.policy_version})"


def cache_tokens(config: VllmConfig) -> int | None:
    """Capacity of the cache in tokens, over all replicas. None: the model has no such cache."""
    cache = config.cache_config
    # Newer releases count tokens per replica, since blocks are not tokens in models with several kinds of layers.
    of_copy: int | None = getattr(cache, "kv_cache_size_tokens", None)
    if of_copy is not None:
        return of_copy * config.parallel_config.data_parallel_size or None
    return (cache.num_gpu_blocks or 0) * cache.block_size or None


def end_with_engine() -> None:
    """End this process when the engine process ends for any reason. No effect outside Linux.

    For the processes of vLLM, which do not read the pipe of the engine. No effect in the engine process.
    """
    named = os.environ.get(ENGINE_PID)
    if named is None or int(named) == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    try:
        # A process descriptor, since the pid may be reused.
        handle = os.pidfd_open(int(named))
    except ProcessLookupError:
        os._exit(1)
    between = os.getppid()  # vLLM starts workers from another process, which ends as well

    def watch() -> None:
        select.select([handle], [], [])
        # Only while it is still the parent of this process.
        if between == os.getppid() and between not in (1, int(named)):
            os.kill(between, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()


def _mixed(seed: int) -> int:
    """Mix an int64 into a seed with a different lower half, the only half that PyTorch's CPU generator reads. The
    result is not negative, since vLLM's second model runner stores an int64.

    Source: the finalizer of SplitMix64, Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    value = seed & (2**64 - 1)
    # Shifts and odd factors: a bijection in which every input bit affects every output bit.
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
    return (value ^ (value >> 31)) & (2**63 - 1)


def _lora_args(rank: int) -> dict[str, Any]:
    # The next larger rank, into which smaller adapters fit.
    fitting = next((value for value in _LORA_RANKS if value >= rank), None)
    if fitting is None:
        raise UserError(f"model.lora_configs: vLLM supports lora_rank up to {_LORA_RANKS[-1]}, not {rank}")
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": fitting}


def set_defaults(on_cpu: bool) -> None:
    """Set defaults of environment variables that vLLM reads on import."""
    own = {
        "VLLM_MAX_NUM_BAD_WORDS": str(MAX_BAD_WORDS),
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": str(MAX_BAD_TOKENS),
        "VLLM_RPC_BASE_PATH": socket_folder(),
    }
    for name, value in (_DEFAULTS | own | (_CPU_DEFAULTS if on_cpu else {})).items():
        os.environ.setdefault(name, value)


def main(file: str, node_rank: str, parent_pid: str) -> None:
    """Entry point of the vLLM processes on a further node (vllm_follower.py), as in `vllm serve --headless`."""
    die_with_parent(int(parent_pid))
    given = json.loads(Path(file).read_text())
    set_defaults(on_cpu=bool(given.pop("on_cpu")))
    os.environ[ENGINE_PID] = str(os.getpid())  # for vLLM's processes, which end with this one
    os.environ[CAUSE_FILE] = f"{file}.cause-{node_rank}"
    # Late: see `VllmEngine._start`.
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    given["model"] = staged(given["model"])
    arguments = AsyncEngineArgs(**given, node_rank=int(node_rank))
    config = arguments.create_engine_config(usage_context=UsageContext.LLM_CLASS, headless=True)
    # It is controlled by the first node; its monitor only sees the processes of this node.
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
    raise SystemExit(1)  # runs until they end


if __name__ == "__main__":
    main(*sys.argv[1:])
