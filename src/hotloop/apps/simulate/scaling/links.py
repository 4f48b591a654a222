"""The links between GPUs by name: data sheets, the share that collectives reach, and where that is from."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hotloop.apps.simulate.scaling.network import Cluster, Interconnect
from hotloop.errors import BadArgument
from hotloop.printing.text import printable
from hotloop.records import Record

TABLE = Path(__file__).with_name("links.json")
NODE = 8  # GPUs


@dataclass(frozen=True)
class NamedLink(Record):
    """A row of the table: the link, and with which one between nodes it is usually found."""

    link: Interconnect
    inside: bool  # of a node
    pair: str


@lru_cache(maxsize=1)
def _rows() -> dict[str, NamedLink]:
    rows = {}
    for row in json.loads(TABLE.read_text(encoding="utf-8"))["links"]:
        link = Interconnect(
            key=row["key"],
            name=row["name"],
            bandwidth=row["peak_gbs"] * row["share"] * 1e9,
            latency=row["latency_us"] * 1e-6,
            shared=row.get("shared", False),
            source=row["source"],
        )
        rows[link.key] = NamedLink(link, row["kind"] == "inside", row.get("pair", ""))
    return rows


def interconnects() -> tuple[Interconnect, ...]:
    """Every link of the table, those inside a node first."""
    return tuple(row.link for row in _rows().values())


def interconnect(name: str) -> Interconnect:
    """The link of a name.

    >>> interconnect("nvlink4").name
    'NVLink 4'
    """
    return _row(name).link


def cluster(names: str, *, node: int = NODE) -> Cluster:
    """GPUs in nodes of 8, joined as named: the link inside a node, or both with a comma between them.

    A link inside a node brings the one between nodes that it is usually found with; a link between nodes alone means
    nodes of one GPU.

    >>> found = cluster("nvlink3")
    >>> found.inside.key, found.between.key, found.node
    ('nvlink3', 'hdr200', 8)
    >>> cluster("ethernet10").node
    1
    """
    first, _, second = (part.strip() for part in names.partition(","))
    row = _row(first)
    if second:
        other = _row(second)
        if not row.inside or other.inside:
            raise BadArgument(
                f"{printable(names)!r} are no links inside and between nodes, in this order",
                fix="name the one inside a node first, as in nvlink4,ndr400",
            )
        return Cluster(row.link, other.link, node)
    if row.inside:
        return Cluster(row.link, _row(row.pair).link, node)
    return Cluster(row.link, row.link, 1)


def usual_link(gpu: str, pcie: float) -> str:
    """The link by which GPUs of a kind are usually joined: by its key, and its bytes per second over PCIe.

    >>> usual_link("h200", 63e9), usual_link("a100-80", 31.5e9), usual_link("rtx4090", 31.5e9)
    ('nvlink4', 'nvlink3', 'pcie4')
    """
    joined = {"a100-40": "nvlink3", "a100-80": "nvlink3", "h100-sxm": "nvlink4", "h20": "nvlink4", "h200": "nvlink4"}
    by_name = {**joined, "gh200": "nvlink4", "b200": "nvlink5"}
    return by_name.get(gpu, "pcie3" if pcie < 20e9 else "pcie4" if pcie < 40e9 else "pcie5")


def _row(name: str) -> NamedLink:
    found = _rows().get(name.strip().lower().replace("-", "").replace(" ", ""))
    if found is None:
        raise BadArgument(f"no link is known as {printable(name)!r}", fix=f"choose one of: {', '.join(_rows())}")
    return found
