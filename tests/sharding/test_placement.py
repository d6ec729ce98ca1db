"""Where devices go in a mesh: described slices of TPUs, split dimensions, several slices."""

import math

import numpy as np
import pytest
from jax.experimental import topologies

from examples.planner import plan_pod
from sharding import make_parallel_mesh
from sharding.placement import links, place
from sharding.testing import factorings


def described(topology, **options):
    return list(topologies.get_topology_desc(topology, platform="tpu", **options).devices)


def hops(mesh, name):
    """The most hops of the torus between neighbours along an axis."""
    places = np.array([d.coords for d in mesh.devices.flat])
    size = np.ptp(places, axis=0) + 1
    steps = np.abs(
        np.diff(places.reshape(*mesh.devices.shape, -1), axis=mesh.axis_names.index(name))
    )
    return np.minimum(steps, size - steps).sum(-1).max()


@pytest.mark.parametrize(
    "text", ["dp=32,cp=4,tp=4", "tp=4,dp=32,cp=4", "dp=8,cp=16,tp=4", "fsdp=64,cp=2,tp=4"]
)
def test_an_axis_that_fills_no_dimension_has_neighbours(text):
    devices = described("v5p:8x8x8")
    mesh = make_parallel_mesh(text, devices=devices).mesh
    assert ",".join(f"{name}={size}" for name, size in mesh.shape.items()) == text
    assert {d.id for d in mesh.devices.flat} == {d.id for d in devices}
    assert hops(mesh, "tp") == 1
    assert mesh.shape["cp"] > 8 or hops(mesh, "cp") == 1


def test_what_mesh_utils_can_do_is_left_to_it():
    mesh = make_parallel_mesh("dp=8,cp=8,tp=8", devices=described("v5p:8x8x8")).mesh
    assert links(mesh) == {"dp": ("z",), "cp": ("y",), "tp": ("x",)}


@pytest.mark.parametrize("topology", ["v5p:2x2x4", "v5e:4x4", "v6e:4x4", "v4:2x2x4", "tpu7x:2x2x2"])
def test_any_factoring_of_any_slice(topology):
    devices = described(topology)
    for text in factorings(len(devices)):
        mesh = make_parallel_mesh(text, devices=devices).mesh
        assert {d.id for d in mesh.devices.flat} == {d.id for d in devices}, text


def test_data_axes_span_slices():
    devices = described("v5p:4x4x4", num_slices=2)
    for text in ("dp=2,cp=8,tp=8", "tp=2,cp=8,dp=8", "fsdp=16,cp=4,tp=2"):
        found = links(make_parallel_mesh(text, devices=devices).mesh)
        for name, along in found.items():
            assert ("slice" in along) == (name in ("dp", "fsdp")), text
    outer = make_parallel_mesh("dp=8,cp=4,tp=4", devices=devices).mesh.devices
    assert [{d.slice_index for d in half.flat} for half in (outer[:4], outer[4:])] == [{0}, {1}]


def test_slices_of_different_sizes_are_refused():
    with pytest.raises(
        ValueError, match=r"devices: got slices of \[63, 64\] devices, expected slices of one size"
    ):
        place([127], described("v5p:4x4x4", num_slices=2)[1:])


def test_uneven_dimensions_are_shared_out():
    devices = described("v5p:4x4x12")
    for sizes in ([24, 2, 4], [2, 8, 12], [32, 6], [2, 3, 32]):
        assert math.prod(sizes) == len(devices)
        assert place(sizes, devices).shape == tuple(sizes)


@pytest.mark.nightly
def test_the_planner_says_what_was_chosen(capsys):
    small = ["--hidden-size", "256", "--vocab-size", "4096", "--tokens", "256"]
    assert plan_pod.main([*small, "--mesh", "dp=2,cp=2,tp=4", "--topology", "v5p:2x2x4"]) == 0
    assert "placed along links: dp y; cp x; tp z" in capsys.readouterr().out
