"""Descriptions of clusters: every number has a source, and what cannot be is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from summa3d.cluster import FOLDER, SOURCES, load, names, read
from summa3d.errors import ClusterError


def number(value: float, source: str = "datasheet") -> dict[str, Any]:
    return {"value": value, "source": source}


def table() -> dict[str, Any]:
    return {
        "peak": {"float32": number(1e13)},
        "device": {"memory": number(16e9), "memory_bandwidth": number(4e11)},
        "product": {"efficiency": number(0.9)},
        "elements": {"efficiency": number(0.5)},
        "collectives": {"launch": number(1e-5)},
        "band": {"percent": number(10)},
        "level": [
            {"name": "node", "size": number(4), "bandwidth": number(1e10), "latency": number(1e-6)},
            {"name": "network", "bandwidth": number(1e9), "latency": number(1e-6)},
        ],
    }


@pytest.mark.parametrize("name", names())
def test_every_shipped_cluster_has_a_source_for_each_number_and_at_most_three_fitted(name: str) -> None:
    cluster = load(name)
    assert cluster.name == name and len(cluster.fitted) <= 3
    assert all(one.source in SOURCES for one in cluster.numbers.values())
    assert cluster.levels[-1].size == 0 and all(level.size for level in cluster.levels[:-1])


def test_the_shipped_clusters() -> None:
    assert names() == [
        *(
            "dgx-h100",
            "frontera-rtx",
            "frontier",
            "gb200-nvl72",
            "host",
            "jean-zay",
            "longhorn",
            "perlmutter",
            "selene",
            "server",
        ),
    ]
    assert [(level.name, level.size, level.ports) for level in load("frontier").levels] == [
        *(("module", 2, 1), ("node", 8, 2), ("network", 0, 4)),
    ]


def test_a_server_describes_cores_and_no_devices() -> None:
    """A job that `plan --write` makes for it is then one of CPU ranks; each has a core, however many there are."""
    assert load("server")["host.slots"] and load("server").crowding(1 << 19) == 1.0


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    file.write_text(Path(load.__code__.co_filename).with_name("clusters").joinpath("selene.toml").read_text(encoding="utf-8"))
    assert load(str(file)).numbers == load("selene").numbers
    with pytest.raises(ClusterError, match=r"no file .*there\.toml"):
        load(str(tmp_path / "there.toml"))


def changed(section: str, key: str, value: Any) -> dict[str, Any]:
    given = table()
    place = given["level"][int(section)] if section.isdigit() else given.setdefault(section, {})
    place[key] = value
    return given


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("device", "memroy", number(1e9), r"unknown key 'device.memroy'; the nearest is 'device.memory'"),
        ("1", "bandwith", number(1e9), r"unknown key 'network.bandwith'; the nearest is 'network.bandwidth'"),
        ("peak", "flaot32", number(1e13), r"unknown key 'peak.flaot32'; the nearest is 'peak.float32'"),
        ("host", "slots", number(-2), r"host.slots = -2 cannot be: ranks of a node that have a core each"),
        ("host", "shared", number(2), r"host.shared = 2 cannot be.*from 0 to 1"),
        (
            "peak",
            "float32",
            number(312),
            r"peak.float32 = 312 cannot be: the most of products of a dtype, in op",
        ),
        ("device", "memory", {"value": 16e9, "sourec": "measured"}, r"a source of datasheet, measured, fitted, assumed"),
        ("device", "memory", 16e9, r"device.memory = 16000000000.0 takes {value = …, source = …"),
        ("device", "memory", number(16e9, "guessed"), r"a source of datasheet, measured, fitted, assumed"),
        ("device", "memory", number(16), r"device.memory = 16 cannot be: memory of a device, in bytes, from 1e\+08"),
        ("1", "bandwidth", number(22.5), r"network.bandwidth = 22.5 cannot be: of a port, in each direction, in bytes"),
        ("1", "latency", number(-1e-6), r"network.latency = -1e-06 cannot be"),
        ("1", "duplex", number(3), r"network.duplex = 3 cannot be"),
        (
            "product",
            "efficiency",
            number(90),
            r"product.efficiency = 90 cannot be: rate of a large product, in parts of the peak",
        ),
        ("device", "memory", number(10**400), r"device.memory = inf cannot be: memory of a device"),
        ("host", "shared", number(0.5), r"host.shared = 0.5 cannot be: .* whole"),
        ("host", "slots", number(1.5), r"host.slots = 1.5 cannot be: .* whole"),
        ("devise", "memory", 16e9, r"unknown key 'devise.memory'; the nearest is 'device.memory'"),
        ("1", "name", "node", r"two levels are named node"),
        ("1", "name", 7, r"needs tables \[\[level\]\], each with a name"),
        ("0", "size", number(2.5), r"node.size = 2.5; sizes and ports are whole"),
        ("1", "size", number(8), r"network.size = 8; sizes and ports are whole; all levels but the outermost have one"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(section: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as refused:
        read(changed(section, key, value), "mine")
    assert "\n" not in str(refused.value)


def test_a_fourth_fitted_number_is_refused() -> None:
    given = table()
    for section in ("product", "elements"):
        given[section]["efficiency"] = number(0.5, "fitted")
    given["level"][0]["bandwidth"] = number(1e10, "fitted")
    assert len(read(given, "mine").fitted) == 3
    given["level"][1]["bandwidth"] = number(1e9, "fitted")
    with pytest.raises(ClusterError, match=r"4 fitted numbers, product.efficiency, elements.efficiency, node.bandwidth, network"):
        read(given, "mine")


def test_levels_must_nest_and_nothing_may_lack() -> None:
    given = table()
    given["level"].insert(1, {"name": "rack", "size": number(6), "bandwidth": number(1e9), "latency": number(1e-6)})
    with pytest.raises(ClusterError, match=r"levels of \[4, 6\] ranks do not nest"):
        read(given, "mine")
    given = table()
    del given["device"], given["level"][1]["latency"]
    with pytest.raises(ClusterError, match=r"lacks device.memory, device.memory_bandwidth, network.latency"):
        read(given, "mine")
    del given["level"][0]["size"], given["peak"], given["band"]
    lacks = r"lacks device.memory, device.memory_bandwidth, band.percent, network.latency, node.size, peak.float32\. .*--template"
    with pytest.raises(ClusterError, match=lacks):
        read(given, "mine")
    with pytest.raises(
        ClusterError, match=r"needs tables \[\[level\]\].* It lacks device.memory, .*, peak.float32 too\. .*--template"
    ):
        read({}, "mine")


def test_all_that_is_no_number_is_named_at_once() -> None:
    given = table()
    given["device"] |= {"memory": {"value": "4GiB", "source": "datasheet"}, "memory_bandwidth": 1e9}
    wrong = r"device.memory = .*4GiB.* \(a number of bytes, not text\), device.memory_bandwidth = 1000000000.0 take \{value = …"
    with pytest.raises(ClusterError, match=wrong):
        read(given, "mine")


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ClusterError, match=r"unknown cluster 'selen'; the nearest is selene"):
        load("selen")
    with pytest.raises(ClusterError, match=r"unknown key 'node.bandwith'; the nearest is 'node.bandwidth'"):
        load("selene").replaced({"node.bandwith": 1e9})
    with pytest.raises(ClusterError, match=r"has no peak of float64; it has those of bfloat16, float16, float32"):
        load("selene").peak("float64")


def test_here_is_the_file_that_the_variable_names_else_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SUMMA3D_CLUSTER", raising=False)
    with pytest.raises(ClusterError, match=r"no file .*summa3d/here\.toml: .*calibrate --write.*SUMMA3D_CLUSTER") as refused:
        load("here")
    assert "\n" not in str(refused.value)
    file = tmp_path / "summa3d" / "here.toml"
    file.parent.mkdir()
    file.write_text((FOLDER / "longhorn.toml").read_text(encoding="utf-8"))
    assert load("here").numbers == load("longhorn").numbers
    other = tmp_path / "other.toml"
    monkeypatch.setenv("SUMMA3D_CLUSTER", str(other))
    with pytest.raises(ClusterError, match=r"no file .*other\.toml"):
        load("here")
    other.write_text("peak = 3 =")
    with pytest.raises(ClusterError, match=r"cluster other is no TOML: .*line 1"):
        load("here")


def test_ranks_share_the_cores_of_their_node_and_the_fullest_sets_the_pace() -> None:
    given = table()
    assert read(given, "mine").crowding(64) == 1 and read(given, "mine").ranks_per_node(64) == 1
    given["host"] = {"slots": number(2), "shared": number(1)}
    host = read(given, "mine")
    assert [host.crowding(ranks) for ranks in (1, 2, 3, 4, 64)] == [1, 1, 2, 2, 2] and host.node == 4
    assert [host.ranks_per_node(ranks) for ranks in (1, 3, 64)] == [1, 3, 4]
    del given["level"][0]
    assert read(given, "mine").crowding(7) == 4 and read(given, "mine").ranks_per_node(7) == 7
