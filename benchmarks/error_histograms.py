"""Draws how large the errors of memlean's log-probabilities and entropies are: docs/errors.png.

    python benchmarks/error_histograms.py [--rows 256] [--vocab 32000] [--chart docs/errors.png]

Against float64, for logits of each dtype and of several magnitudes (normal, times the number in the legend), the chosen
token drawn from the row's own distribution; beside them torch's ``logits.float().log_softmax(-1)`` at the middle
magnitude. Errors are absolute, in nats.
"""

import argparse

import matplotlib
import torch

from memlean import selective_log_softmax

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAGNITUDES = (1, 4, 16, 64)
COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#d55e00")  # told apart by the colour-blind too
TORCH_AT = 4
FLOOR = 1.1e-10  # exact results are drawn here, in the first bin


def errors(logits: torch.Tensor, index: torch.Tensor, function) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = logits.double().log_softmax(-1)
    truth = log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1), -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(-1)
    got = function(logits, index)
    return tuple((a.double() - b).abs().clamp(min=FLOOR) for a, b in zip(got, truth, strict=True))


def memlean(logits, index):
    return selective_log_softmax(logits, index, return_entropy=True)


def torch_float32(logits, index):
    log_p = logits.float().log_softmax(-1)
    return log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--chart", default="docs/errors.png")
    options = parser.parse_args()
    torch.manual_seed(0)
    bins = torch.logspace(-10, -3, 43).numpy()
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), sharex=True, sharey=True, layout="constrained")
    for column, (name, dtype) in enumerate(DTYPES.items()):
        for magnitude, colour in zip(MAGNITUDES, COLOURS, strict=True):
            logits = (torch.randn(options.rows, options.vocab) * magnitude).to(dtype)
            index = logits.double().softmax(-1).multinomial(1).squeeze(-1)
            cases = [(memlean, {"color": colour, "linewidth": 1.8, "label": f"memlean, logits x {magnitude}"})]
            if magnitude == TORCH_AT:
                style = {"color": "0.45", "linestyle": ":", "linewidth": 1.8}
                cases.append((torch_float32, style | {"label": f"torch float32, logits x {magnitude}"}))
            for function, style in cases:
                for row, (error, what) in enumerate(
                    zip(errors(logits, index, function), ("logp", "entropy"), strict=True)
                ):
                    axes[row, column].hist(error.numpy(), bins=bins, histtype="step", **style)
                    worst = f"{error.max().item():.1e}"
                    print(f"{name:10}{what:9}{style['label']:30}largest error {worst} nats")
        axes[0, column].set_title(f"{name} logits")
        axes[1, column].set_xlabel("absolute error, nats (1e-10: none)")
    for row, what in enumerate(("logp", "entropy")):
        axes[row, 0].set_ylabel(f"{what}: rows of {options.rows}")
        axes[row, 0].set_xscale("log")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(options.chart, dpi=110)


if __name__ == "__main__":
    main()
