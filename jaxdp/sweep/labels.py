"""Names and units of what a sweep varies and computes."""

from __future__ import annotations

# name: (long name, units)
LABELS = {
    name: (name.replace("_", " "), "1")
    for name in (
        "batch_size",
        "collision_probability",
        "delta",
        "false_positive_rate",
        "learning_rate",
        "radius",
        "sampling_probability",
        "smoothness",
        "strong_convexity",
        "subset_size",
    )  # fmt: skip
} | {
    "eps0": ("local epsilon", "nats"),
    "epsilon": ("epsilon", "nats"),
    "delta0": ("local delta", "1"),
    "num_users": ("number of users", "1"),
    "num_categories": ("number of categories", "1"),
    "noise_multiplier": ("noise multiplier (standard deviation or scale over sensitivity)", "1"),
    "sigma": ("noise multiplier (standard deviation over sensitivity)", "1"),
    "steps": ("number of steps", "1"),
    "num_steps": ("number of steps", "1"),
    "num_examples": ("number of examples", "1"),
    "num_buckets": ("number of hash buckets", "1"),
    "scale": ("scale of the noise", "1"),
    "noise_std": ("standard deviation of the noise", "1"),
    "clip_norm": ("clipping norm", "1"),
    "lipschitz": ("Lipschitz constant", "1"),
    "q": ("sampling probability", "1"),
    "times": ("number of compositions", "1"),
    "order": ("Renyi order", "1"),
    "bound": ("amplification theorem", ""),
    "randomizer": ("local randomizer", ""),
    "lower": ("certified lower bound", ""),
    "upper": ("certified upper bound", ""),
    "renyi": ("Renyi divergence", "nats"),
    "tradeoff": ("false negative rate", "1"),
    "value": ("value", ""),
}


def label(name: str) -> dict[str, str]:
    """The attributes long_name and units of an axis or a variable."""
    base, _, side = name.rpartition("_")
    if side in ("lower", "upper") and base in LABELS:
        long_name, units = LABELS[base]
        return {"long_name": f"{long_name}, certified {side} bound", "units": units}
    long_name, units = LABELS.get(name, (name.replace("_", " "), ""))
    return {"long_name": long_name} | ({"units": units} if units else {})


def variable(name: str, verb: str, axes: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The final name and the attributes of a variable whose numbers came from a verb.

    An array without a name of its own gets the verb's. The two sides of a `Bounds` are labelled by the verb: lower of
    epsilon_bounds is epsilon_lower.
    """
    if name == "value" and verb in LABELS and verb not in axes:
        name = verb
    quantity = verb.removesuffix("_bounds")
    sided = name in ("lower", "upper") and quantity in LABELS
    return name, label(f"{quantity}_{name}" if sided else name)
