"""Effect of rounding on logprobs, by data type, compared with the effect of damage: the basis of the bounds of
rftdask/synchronizer/fingerprint.py.

    python benchmarks/tolerances.py [--quick] [--json FILE] [--layers N] [--hidden N] [--seeds N] [--table]

Each seed draws the weights of a Qwen3 whose logits have a standard deviation of 3, like those of a trained model. The
logprobs of the fixed sequences of a fingerprint are computed in float32, and then

- in float16 and bfloat16, by transformers in that data type, as an engine does;
- in 8 bits (e4m3): weights and inputs of every linear layer except the output head are rounded, with a scale per
  tensor, per channel or token, or per block of 128, and multiplied in bfloat16, the best case of 8-bit kernels;
- in float32 on one thread with eager attention: the same sums in another order;
- with damage, in float32: with another output head, and without the last layer.

Layers add as much as they receive, so rounding grows through all of them; a trained model is less sensitive. A bound is
valid if rounding stays below it by a margin and damage is above it. --table prints the rows of docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import torch
from report import Report, make_parser
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rftdask.synchronizer.fingerprint import TOLERANCES, fixed_sequences

VOCAB, SPREAD, BLOCK = 8192, 3.0, 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
Gaps = tuple[float, float]
"""(largest, mean) absolute difference of logprobs from float32, in nats."""


def make_model(seed: int, layers: int, hidden: int, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=64,
        initializer_range=hidden**-0.5,  # so that the activations neither grow nor shrink with depth
    )
    config._attn_implementation = attention
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(SPREAD / logits_of(model).std())
    return model


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor(fixed_sequences(VOCAB))).logits
    return logits


def logprobs_of(model: PreTrainedModel) -> Tensor:
    """Return the logprobs of every token but the first; the softmax is float32, as in engines and the trainer."""
    logprobs = logits_of(model)[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(fixed_sequences(VOCAB))[:, 1:, None]).squeeze(-1)


def rounded(values: Tensor, block: int | None, dim: int | None) -> Tensor:
    """Round to e4m3 with one scale per tensor, per slice along `dim`, or per block of the last dimension."""
    shaped = values.float()
    if block is not None and values.shape[-1] % block == 0:
        shaped, dim = shaped.unflatten(-1, (-1, block)), -1
    largest = shaped.abs().amax() if dim is None else shaped.abs().amax(dim, keepdim=True)
    scale = largest.clamp(min=1e-12) / LARGEST
    return ((shaped / scale).to(torch.float8_e4m3fn).float() * scale).reshape(values.shape)


def in_eight_bits(model: PreTrainedModel, block: int | None, dim: int | None) -> PreTrainedModel:
    """Return the model with 8-bit linear layers, except its output head."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.data = rounded(layer.weight.data, block, dim)
            layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], block, dim).to(inputs[0].dtype),))
    return model.to(torch.bfloat16)


def with_other_head(model: PreTrainedModel) -> PreTrainedModel:
    head = model.lm_head.weight
    head.data = torch.randn(head.shape, generator=torch.Generator().manual_seed(99)) * head.data.std()
    return model


def with_a_layer_less(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers = model.model.layers[:-1]
    return model


WAYS: dict[str, tuple[str, Callable[[PreTrainedModel], PreTrainedModel]]] = {
    "float32, another order of sums": ("float32", lambda model: model),
    "float16": ("float16", lambda model: model.to(torch.float16)),
    "bfloat16": ("bfloat16", lambda model: model.to(torch.bfloat16)),
    "8 bits, a scale for each tensor": ("fp8", lambda model: in_eight_bits(model, None, None)),
    "8 bits, for each channel and token": ("fp8", lambda model: in_eight_bits(model, None, -1)),
    f"8 bits, for each block of {BLOCK}": ("fp8", lambda model: in_eight_bits(model, BLOCK, -1)),
    "another output head": ("", with_other_head),
    "a layer less": ("", with_a_layer_less),
}
"""Way -> (its bound in TOLERANCES, "" for damage; function that changes the model)."""


def measure(seeds: int, layers: int, hidden: int) -> dict[str, list[Gaps]]:
    """Return the differences of each way, seed by seed."""
    gaps_by_way: dict[str, list[Gaps]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        exact = logprobs_of(make_model(seed, layers, hidden))
        for way, (bound, change) in WAYS.items():
            other = bound == "float32"
            threads = torch.get_num_threads()
            torch.set_num_threads(1 if other else threads)
            gaps = (logprobs_of(change(make_model(seed, layers, hidden, "eager" if other else "sdpa"))) - exact).abs()
            torch.set_num_threads(threads)
            gaps_by_way[way].append((float(gaps.max()), float(gaps.mean())))
    return gaps_by_way


def main() -> None:
    parser = make_parser(__doc__)
    for name, usual in (("layers", 28), ("hidden", 256), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual, metavar="N")
    parser.add_argument("--table", action="store_true", help="also print Markdown rows")
    args = parser.parse_args()
    if args.quick:
        args.layers, args.hidden, args.seeds = 2, 128, 1
    report, lines = Report(args), list[str]()
    for way, gaps in measure(args.seeds, args.layers, args.hidden).items():
        bounds, is_damage = TOLERANCES.get(WAYS[way][0], (0.0, 0.0)), not WAYS[way][0]
        cells = []
        for number, what in enumerate(("largest", "mean")):
            each = [gap[number] for gap in gaps]
            # The worst seed of rounding must be within the bound, the mildest damage beyond it.
            worst = min(each) if is_damage else max(each)
            goal = None if is_damage else bounds[number]
            report.add(f"{way}: {what} difference", worst, "nats", less_is_better=not is_damage, goal=goal)
            cells.append(f"{worst:.2g} ({mean(each):.2g})")
        lines.append(
            f"| {way} | {cells[0]} | {cells[1]} | " + ("" if is_damage else f"{bounds[0]:g}, {bounds[1]:g}") + " |"
        )
    if args.table:
        print(
            "\n".join(("| computed in | largest difference | mean difference | bounds |", "|---|---|---|---|", *lines))
        )
    report.write()


if __name__ == "__main__":
    main()
