"""Halve a shard that does not fit a device: its slabs at home stay in place, each half takes its part of them."""

from __future__ import annotations

from methods.sharding.shard import PARTS, NamedLayer, Shard


def slot_bytes(shard: Shard) -> int:
    """Bytes that it takes in a slot."""
    return sum(shard.num_bytes(part) for part in PARTS)


def split(shards: list[Shard], index: int) -> None:
    """Replace a shard of several layers by two halves, as equal in bytes as possible."""
    whole = shards[index]
    sizes = [0] * len(whole.layers)
    for name in whole.own:
        place = whole.weights_at.places[name]
        sizes[whole.sites[name][0][0]] += place.stop - place.start
    at = min(range(1, len(sizes)), key=lambda place: max(sum(sizes[:place]), sum(sizes[place:])))
    left = _part(whole, whole.named[:at], {})
    right = _part(whole, whole.named[at:], dict.fromkeys(left.own, left))
    for part, slab in whole.slabs.items():
        middle = left.own_size(part)
        left.slabs[part], right.slabs[part] = slab[:middle], slab[middle : middle + right.own_size(part)]
    right.sums = whole.sums & right.sites.keys()
    left.sums = (whole.sums | right.sites.keys()) & left.sites.keys()
    whole.release()
    shards[index : index + 1] = [left, right]
    for other in shards:
        for name, lender in other.lenders.items():
            if lender is whole:
                other.lenders[name] = left if name in left.own else right


def _part(whole: Shard, layers: list[NamedLayer], lenders: dict[str, Shard]) -> Shard:
    names = {name for layer in layers for name in layer.names.values()}
    lenders = {name: lender for name, lender in {**whole.lenders, **lenders}.items() if name in names}
    part = Shard(layers, lenders, whole.make_optimizer, mixed=whole.mixed)
    part.landed, part.fetched, part.slabs = whole.landed, whole.fetched, {}
    return part
