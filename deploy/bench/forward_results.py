"""The results of running the forward pass alone: what rows cost, what is not linear, how exact it is."""

from typing import Any

from deploy.bench.entries import column, having, median, ratio_summary, summary
from deploy.bench.records import Records
from deploy.bench.roofline import Machine, Work, minimal_seconds
from deploy.bench.settings import Settings

_SUMS = ("num_tokens", "loss", "loss_float32", "divergence", "num_agreed")


def verify_results(settings: Settings, records: Records, machine: Machine | None) -> list[dict[str, Any]]:
    """One object for each variant, context and number of rows that has been measured."""
    found = []
    for variant in settings.variants:
        facts = records.get(("variant", variant.label))
        if facts is None:
            continue
        work = Work(**facts["work"])
        for context in settings.contexts:
            entries = having(records.of("verify"), variant.label, context)
            least = column(having(entries, settings.row_counts[0]), "seconds")
            for count in settings.row_counts:
                values = column(having(entries, count), "seconds")
                spent = summary(values.values())
                if spent is None:
                    continue
                share = None
                if machine is not None:
                    share = minimal_seconds(work, machine, num_rows=count, context=context) / spent["median"]
                found.append(
                    {
                        "variant": variant.label,
                        "weight_format": facts["weight_format"],
                        "kernel": facts["kernel"],
                        "context": context,
                        "num_rows": count,
                        "seconds": spent["median"],
                        "seconds_spread": spent,
                        "compared_with": settings.row_counts[0],
                        "ratio": ratio_summary(values, least),
                        "share_of_limit": share,
                    }
                )
    return found


def outside_linear(settings: Settings, records: Records) -> list[dict[str, Any]]:
    """The share of a one-row pass that is not linear layers, for each variant whose kernel can tell."""
    found = []
    for variant in settings.variants:
        head = (variant.label, settings.contexts[0], 1)
        linear = column(having(records.of("linear"), *head), "seconds")
        ratios = ratio_summary(linear, column(having(records.of("verify"), *head), "seconds"))
        if ratios is None:
            continue
        share = {name: 1.0 - ratios[name] for name in ("median", "low", "high")}
        # What is a low share of linear layers is a high one of the rest.
        share["low"], share["high"] = share["high"], share["low"]
        found.append(
            {
                "variant": variant.label,
                "context": settings.contexts[0],
                "linear_seconds": median(summary(linear.values())),
                "share": share["median"],
                "share_spread": share,
                "count": ratios["count"],
            }
        )
    return found


def quality_results(settings: Settings, records: Records) -> list[dict[str, Any]]:
    """How near each variant is to float32, over all prompts."""
    found = []
    for variant in settings.variants:
        entries = having(records.of("quality"), variant.label)
        total = {name: sum(entry[name] for entry in entries.values()) for name in _SUMS}
        count = total["num_tokens"]
        if count:
            facts = records.get(("variant", variant.label))
            found.append(
                {
                    "variant": variant.label,
                    "weight_format": None if facts is None else facts["weight_format"],
                    "num_tokens": count,
                    "loss": total["loss"] / count,
                    "loss_float32": total["loss_float32"] / count,
                    "divergence": total["divergence"] / count,
                    "agreement": total["num_agreed"] / count,
                }
            )
    return found
