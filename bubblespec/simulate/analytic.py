"""The cost of a forward on a GPU that nobody has measured, from its data sheet: analytic, not
measured.

    T = launch + max(weights / bandwidth, 2 * parameters * tokens / compute) + K/V of all positions
        / bandwidth + 4 * layers * heads * head dimension * attended pairs / compute

The linear layers read all weights once, or compute, whichever takes longer (roofline; Williams,
Waterman and Patterson 2009). Attention reads the keys and values of every attended position once,
however many tokens the row feeds, and computes on them after that. Bandwidth and compute are those
of the data sheet times the share that kernels reach. It leaves out what a data sheet does not say:
sampling, kernels that are slower at odd shapes, the host.
"""

import argparse
import os
import sys

from bubblespec.errors import InputError
from bubblespec.simulate.cost import RATES, ForwardCost

# NVIDIA's data sheets: bytes a second of HBM, dense bfloat16 operations a second.
GPUS = {
    "h200": (4.8e12, 989e12),
    "h100": (3.35e12, 989e12),
    "a100": (2.04e12, 312e12),
}
# Parameters, layers, query heads, key/value heads and head dimension, from the models' config.json.
MODELS = {
    "32b": (32.76e9, 64, 40, 8, 128),  # Qwen2.5-32B
    "7b": (7.62e9, 28, 28, 4, 128),  # Qwen2.5-7B
    "1.5b": (1.54e9, 28, 12, 2, 128),  # Qwen2.5-1.5B
    "0.5b": (0.49e9, 24, 14, 2, 64),  # Qwen2.5-0.5B
}


def analytic_cost(
    gpu: str, model: str, launch_s: float, bandwidth_share: float, *, compute_share: float
) -> ForwardCost:
    """gpu, model: of the tables above; launch_s: of a forward's kernels, with what the host does in
    between."""
    bandwidth, compute = GPUS[gpu][0] * bandwidth_share, GPUS[gpu][1] * compute_share
    parameters, layers, heads, kv_heads, dimension = MODELS[model]
    weights_s = 2 * parameters / bandwidth  # bfloat16
    token_s = 2 * parameters / compute
    knee = max(
        round(weights_s / token_s), 1
    )  # tokens that compute as long as the weights take to come
    knots, slopes = ([1, knee], [0.0, token_s]) if knee > 1 else ([1], [token_s])
    rates = dict.fromkeys(RATES, 0.0)
    rates["positions"] = 2 * 2 * layers * kv_heads * dimension / bandwidth
    rates["pairs"] = 4 * layers * heads * dimension / compute
    source = (
        f"analytic, not measured: {model} on one {gpu}, {GPUS[gpu][0] / 1e12:g} TB/s at {bandwidth_share:g}, "
        f"{GPUS[gpu][1] / 1e12:g} TFLOP/s bfloat16 at {compute_share:g}, launch {launch_s * 1e3:g} ms"
    )
    constant = launch_s + max(weights_s, token_s)
    return ForwardCost(
        knots,
        slopes,
        constant,
        rates,
        kind="analytic",
        hardware={"source": source},
        model=f"Qwen2.5-{model.upper()}, bfloat16",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Cost of a forward on a GPU, from its data sheet: analytic, not measured"
    )
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--model", choices=MODELS, default="7b")
    parser.add_argument(
        "--launch-ms",
        type=float,
        default=3.0,
        help="of a forward: kernels that a graph starts, and the host",
    )
    parser.add_argument(
        "--bandwidth-share",
        type=float,
        default=0.8,
        help="of the data sheet's bandwidth that is reached",
    )
    parser.add_argument(
        "--compute-share",
        type=float,
        default=0.5,
        help="of the data sheet's operations that are reached",
    )
    parser.add_argument(
        "--propose-us", type=float, nargs=2, default=(200.0, 10.0), metavar=("ALWAYS", "ROW")
    )
    parser.add_argument("--output", required=True, help="JSON file, which must not exist")
    arguments = parser.parse_args()
    try:
        if os.path.exists(arguments.output):
            raise InputError(f"--output: {arguments.output} exists")
        if not (
            arguments.launch_ms >= 0
            and 0 < arguments.bandwidth_share <= 1
            and 0 < arguments.compute_share <= 1
        ):
            raise InputError("--launch-ms must be at least 0, and shares above 0 and at most 1")
        rates = arguments.launch_ms / 1e3, arguments.bandwidth_share
        cost = analytic_cost(
            arguments.gpu, arguments.model, *rates, compute_share=arguments.compute_share
        )
        cost.propose = [microseconds / 1e6 for microseconds in arguments.propose_us]
        try:
            cost.save(arguments.output)
        except OSError as error:
            raise InputError(f"--output: {arguments.output}: {error.strerror}") from error
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: {cost.hardware['source']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
