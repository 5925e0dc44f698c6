import re

import pytest

from smalti.estimate.compile.target import find_target


@pytest.mark.parametrize(
    ("chip", "topology", "kind", "cores"),
    [
        ("v4", "v4:2x2x1", "TPU v4", 1),
        ("v5e", "v5e:2x2", "TPU v5 lite", 1),
        ("v5p", "v5p:2x2x1", "TPU v5", 2),
        ("v6e", "v6e:2x2", "TPU v6 lite", 1),
        ("v7x", "tpu7x:2x2x1", "TPU7x", 1),
    ],
)
def test_a_chip_alone_is_one_device_of_its_smallest_topology(chip, topology, kind, cores):
    target = find_target(chip)
    assert (target.topology, target.devices) == (topology, 1)
    device = target.mesh().abstract_device
    assert (device.platform, device.device_kind, device.num_cores) == ("tpu", kind, cores)


def test_a_slice_has_a_mesh_over_all_its_devices():
    target = find_target("v6e", "v6e:4x4", {"data": 8, "model": 2})
    assert target.devices == target.topology_devices == 16
    assert target.mesh().shape == {"data": 8, "model": 2}


@pytest.mark.parametrize("topology", ["v7x:2x2x1", "tpu7x:2x2x1"])
def test_v7x_is_spelled_as_libtpu_spells_it_and_has_two_devices_a_chip(topology):
    target = find_target("v7x", topology, {"data": 8})
    assert (target.chip, target.topology) == ("v7x", "tpu7x:2x2x1")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("v6",),
            "chip 'v6' is not known; it is one of v4, v5e, v5p, v6e, v7x; did you mean v6e?",
        ),
        (
            ("tpu7x",),
            "chip 'tpu7x' is not known; it is one of v4, v5e, v5p, v6e, v7x; did you mean v7x?",
        ),
        (("h100",), "chip 'h100' is not known; it is one of v4, v5e, v5p, v6e, v7x"),
        (
            ("v6e", "4x4"),
            "topology '4x4' is not a chip and the shape of its slice: write v6e:2x2, or v6e:4x4 "
            "for 16 chips",
        ),
        (
            ("v6e", "v6:4x4"),
            "topology 'v6:4x4' names no chip that is known; it starts with one of v4:, v5e:, "
            "v5p:, v6e:, v7x:; did you mean v6e?",
        ),
        (
            ("v6e", "v5e:4x4"),
            "topology 'v5e:4x4' is of v5e, but chip is 'v6e': pass chip='v5e'",
        ),
        (
            ("v6e", "v6e:4x4", {"data": 8}),
            "mesh_axes {'data': 8} makes 8 devices, but v6e:4x4 has 16: use all of them, or one",
        ),
        (
            ("v6e", None, {"data": 0}),
            "mesh_axes has 'data': 0; it maps names of axes to sizes of at least 1, as in "
            '{"data": 16}',
        ),
        (
            ("v4", None, {"data": 8}),
            "mesh_axes {'data': 8} makes a slice of v4, whose devices are then whole chips of two "
            "cores, which is not modelled: leave mesh_axes out, or take another chip",
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(arguments, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        find_target(*arguments)
