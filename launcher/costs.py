"""Costs of slices: list prices per chip and hour, by generation, region and capacity.

The table has a date: Google changes spot prices up to once a month, and contracts and reservations have their own
prices. A price that is not in the table is unknown, never guessed; with `slice.max_cost_per_hour`, a slice of unknown
price is refused.

Source: Google's price list (cloud.google.com/tpu/pricing) as SkyPilot's catalogue reads it through Google's billing API
(github.com/skypilot-org/skypilot-catalog, catalogs/v8/gcp/vms.csv at 8427bbff), slices divided by their chips. US
dollars, without taxes.
"""

from launcher.config import Config
from launcher.errors import BadInput
from training.accelerators import accelerator
from training.machine import parse_time

AS_OF = "2026-11"  # when the table was read


# Dollars for a GiB from Cloud Storage to another region; `_FAR` by the beginning of either end's name.
_WITHIN, _OVER_THE_ATLANTIC, _ELSEWHERE = 0.02, 0.05, 0.08
_FAR = {"asia-southeast2": 0.10, "australia-": 0.10, "africa-": 0.11, "me-": 0.11, "southamerica-": 0.14}

# Dollars per chip and hour, (on demand, spot), None if unknown; by generation (of v2 and v3, slices on one host have
# other prices than larger ones) and region.
_PRICES: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "v2 on one host": {
        "us-central1": (1.125, 0.3375),
        "europe-west4": (1.2375, 0.31556),
        "asia-east1": (1.305, 0.3915),
    },
    "v2": {"us-central1": (1.5, 0.3825), "europe-west4": (1.5, 0.3825)},
    "v3 on one host": {"us-central1": (2.0, 0.51), "europe-west4": (2.2, 0.561), "us-east1": (2.0, None)},
    "v3": {"europe-west4": (2.0, 0.66), "us-east1": (2.0, 0.6)},
    "v4": {"us-central2": (3.22, 0.9215)},
    "v5e": {
        "us-central1": (1.2, 0.24493),
        "us-south1": (1.416, 0.5664),
        "us-west1": (1.2, 0.24493),
        "us-west4": (1.2, 0.48),
        "us-east1": (1.2, 0.24493),
        "us-east5": (1.2, 0.6),
        "europe-west4": (1.56, 0.40453),
        "asia-southeast1": (1.56, 0.78),
    },
    "v5p": {"us-central1": (4.2, 0.92856), "us-east5": (4.2, 1.68), "europe-west4": (4.2525, 1.34849)},
    "v6e": {
        "us-central1": (2.7, 0.57285),
        "us-east1": (2.7, 0.57285),
        "us-east5": (2.7, 1.35),
        "us-south1": (2.7, 1.35),
        "europe-west4": (2.97, 1.03748),
        "asia-northeast1": (3.24, 0.85774),
        "southamerica-west1": (2.7, None),
    },
}


def per_hour(accelerator_type: str, zone: str, capacity: str) -> float | None:
    """Returns the list price of a whole slice in dollars an hour; None when the table lacks it. `capacity` is as
    `slice.capacity`; all but spot have the on-demand price, an upper bound. Raises UnknownAccelerator."""
    slice_type = accelerator(accelerator_type)
    generation = slice_type.generation.name
    on_one_host = f"{generation} on one host"
    table = _PRICES.get(on_one_host if slice_type.hosts == 1 and on_one_host in _PRICES else generation, {})
    on_demand, spot = table.get(zone.rsplit("-", 1)[0], (None, None))
    per_chip = spot if capacity == "spot" else on_demand
    return None if per_chip is None else per_chip * slice_type.chips


def transfer_per_gb(location: str, region: str) -> float:
    """Returns the dollars for a GiB from a bucket in `location` (in lower case) to a host in `region`, by the matrix
    "Data transfer within Google Cloud" of https://cloud.google.com/storage/pricing; 0 within a region, for "", and for
    dual-regions and multi-regions, although reading from a multi-region costs as much as from another region."""
    if location == region or not location[-1:].isdigit() or "-" not in location:
        return 0.0
    ends = {location.partition("-")[0].replace("northamerica", "us"), region.partition("-")[0]}
    if ends <= {"us", "europe"}:
        return _WITHIN if len(ends) == 1 else _OVER_THE_ATLANTIC
    far = (price for place, price in _FAR.items() if location.startswith(place) or region.startswith(place))
    return max(far, default=_ELSEWHERE)


def line(config: Config) -> str:
    """Returns a line about the configured slice's cost an hour, or that it is unknown, with the table's date."""
    cost = per_hour(config.slice.accelerator_type, config.zone, config.slice.capacity)
    subject = f"{config.slice.accelerator_type}, {config.slice.capacity}, {config.zone}"
    if cost is None:
        return (
            f"cost: unknown ({subject} is not in the price table of {AS_OF}); see https://cloud.google.com/tpu/pricing"
        )
    has_own_price = config.slice.capacity not in ("on-demand", "spot")
    upper = f", at most: {config.slice.capacity} capacity has a price of its own" if has_own_price else ""
    return f"cost: about ${cost:.2f} an hour ({subject}; list prices of {AS_OF}{upper})"


def so_far(accelerator_type: str, zone: str, capacity: str, seconds: float) -> float | None:
    """Returns the dollars, as `per_hour` counts, for a slice that has existed for `seconds`; None when its type or its
    price is unknown."""
    try:
        cost = per_hour(accelerator_type, zone, capacity)
    except ValueError:  # a type that the table of accelerators lacks
        return None
    return None if cost is None else cost * max(0.0, seconds) / 3600


def of_slice(config: Config, created: str, now: float) -> float | None:
    """Returns the slice's dollars, as `per_hour` counts, from `created` (RFC 3339) to `now` (Unix seconds); None if
    `created` is no time, or its type or price is unknown."""
    begun, slice_ = parse_time(created), config.slice
    return None if begun is None else so_far(slice_.accelerator_type, config.zone, slice_.capacity, now - begun)


def since(config: Config, created: str, now: float) -> str:
    """Returns a text about the slice's age and cost so far; "" when the API does not give its creation time."""
    begun, cost = parse_time(created), of_slice(config, created, now)
    if begun is None:
        return ""
    amount = "unknown" if cost is None else f"about ${cost:.2f} (list prices of {AS_OF})"
    return f"created {duration(now - begun)} ago, cost so far: {amount}"


def check(config: Config) -> None:
    """Raises BadInput if the price an hour exceeds max_cost_per_hour or price_limit, or is unknown with one set."""
    cost = per_hour(config.slice.accelerator_type, config.zone, config.slice.capacity)
    limits = {
        "slice.max_cost_per_hour, --max-cost": config.slice.max_cost_per_hour,
        "slice.price_limit": config.slice.price_limit,
    }
    for keys, limit in limits.items():
        if limit is not None and (cost is None or cost > limit):
            end = "Without a limit it is created" if cost is None else "Nothing was created"
            raise BadInput(f"the limit ({keys}) is ${limit:.2f} an hour, but {line(config)}. {end}")


def duration(seconds: float) -> str:
    """Returns seconds, also negative ones, in their largest units without a sign: "3 d 4 h", "2 h 5 min", "40 s"."""
    whole = int(abs(seconds))
    days, hours, minutes = whole // 86400, whole % 86400 // 3600, whole % 3600 // 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{whole} s"
