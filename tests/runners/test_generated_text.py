"""The text the emulator compiles is, byte for byte, what MLX prints for the same call."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.launch import arguments, launch

from mlx_kda.runners import metal_kernel
from mlx_kda.runners.text import ATTRIBUTES, TYPE_NAMES

DTYPES = list(TYPE_NAMES)


@pytest.fixture
def printed(tmp_path, capfd):
    """MLX's print-out of a call, from inside export_function (no Metal needed)."""

    def get(definition, inputs, output_shapes, output_dtypes, template):
        kernel = mx.fast.metal_kernel(**definition)
        extra = {} if template is None else {"template": template}

        def call(*arrays):
            call = arguments(list(arrays), output_shapes, output_dtypes, 32, verbose=True)
            return kernel(**call, **extra)

        capfd.readouterr()
        mx.export_function(str(tmp_path / "x.mlxfn"), call, *inputs)
        out = capfd.readouterr().out
        head = f"Generated source code for `{definition['name']}`:\n```\n"
        assert out.startswith(head) and out.endswith("\n```\n")
        return out[len(head) : -len("\n```\n")]

    return get


def assert_same(printed, definition, inputs, output_dtypes, template=None):
    shapes = [(4,)] * len(output_dtypes)
    ours = metal_kernel(**definition).generate(inputs, output_dtypes, template)
    theirs = printed(definition, inputs, shapes, output_dtypes, template)
    assert ours.text == theirs
    lines = ours.text.split("\n")
    source = lines[ours.source_first - 1 : ours.source_first - 1 + ours.source_lines]
    assert "\n".join(source) == definition["source"]


def definition(source, inputs="a b c", outputs="o", **extra):
    return {
        "name": "some_name",
        "input_names": inputs.split(),
        "output_names": outputs.split(),
        "source": source,
        **extra,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=TYPE_NAMES.get)
@pytest.mark.parametrize("outputs", ["o", "o p"])
def test_text_for_every_dtype(printed, dtype, outputs):
    arrays = [mx.zeros((9,), dtype), mx.zeros((2, 3), dtype), mx.zeros((), dtype)]
    template = [("T", dtype), ("N", 12), ("M", -3), ("F", True), ("G", False)]
    source = "\n  uint i = thread_position_in_grid.x;\n  // a_shape, b_strides and c_ndim\n"
    n = len(outputs.split())
    assert_same(printed, definition(source, outputs=outputs), arrays, [dtype] * n, template)


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (7,), (8,), (2, 3), (2, 4), (1, 1, 1), (3, 0, 2)]
)
def test_address_space_follows_the_size(printed, shape):
    arrays = [mx.zeros(shape), mx.zeros((64, 2)), mx.zeros(shape, mx.int64)]
    for source in (
        "a[0];",
        "a_shape[0] a_strides[0] a_ndim c_ndim",
        "xa_shapey thread_position_in_grid",
    ):
        assert_same(printed, definition(source), arrays, [mx.float16])


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_attribute_is_found_by_name(printed, attribute):
    arrays = [mx.zeros((9,))]
    for source in (f"uint3 {attribute};", f"// x{attribute}y", f"{attribute}\nthreads_per_grid"):
        assert_same(printed, definition(source, "a", "o p"), arrays, [mx.float32, mx.int8])


def test_all_attributes_and_no_attribute(printed):
    arrays = [mx.zeros((9,))]
    assert_same(printed, definition(";".join(ATTRIBUTES), "a"), arrays, [mx.float32])
    # Without an attribute MLX 0.32.4 may close the parameter list twice.
    for source in (
        "o[0] = p[0];",
        "a_shape[0];",
        "a_shape[0] + a_ndim;",
        "a_strides a_shape a_ndim",
    ):
        for outputs in ("o", "o p", "o p q"):
            dtypes = [mx.float32] * len(outputs.split())
            assert_same(printed, definition(source, "a", outputs), arrays, dtypes)


@pytest.mark.parametrize(
    "header", ["", "struct S {};", "\n\n#define X 1\n", "// no newline at the end"]
)
@pytest.mark.parametrize("template", [None, [], [("T", mx.bfloat16)], [("b", True)], [("n", -1)]])
@pytest.mark.parametrize("atomic", [False, True])
def test_header_template_and_atomic_outputs(printed, header, template, atomic):
    made = definition(
        "o[thread_position_in_grid.x] = 1;", "a", header=header, atomic_outputs=atomic
    )
    assert_same(printed, made, [mx.zeros((9,))], [mx.float32], template)


def test_names_that_contain_each_other(printed):
    arrays = [mx.zeros((2,)), mx.zeros((12,)), mx.zeros((3, 4))]
    for source in ("aa_shape", "xaa_strides", "aaa_ndim a_ndim", "o_shape"):
        assert_same(printed, definition(source, "a aa aaa"), arrays, [mx.int32])


def test_python_scalars_become_references(printed):
    made = definition("o[0] = a + b + c;")
    kernel = metal_kernel(**made)
    ours = kernel.generate([3, 2.5, True], [mx.float32]).text
    arrays = [mx.array(3), mx.array(2.5), mx.array(True)]
    assert ours == printed(made, arrays, [(4,)], [mx.float32], None)
    assert "const constant int32_t& a" in ours and "const constant bool& c" in ours


def test_shape_strides_and_rank_reach_the_kernel():
    source = """
    uint i = thread_position_in_grid.x;
    if (i < 3) out[i] = a_shape[i];
    else if (i < 6) out[i] = a_strides[i - 3];
    else out[i] = a_ndim;
    """
    out = launch(source, [mx.arange(24).reshape(2, 3, 4)], shapes=[(7,)], dtypes=mx.int32)
    assert out.tolist() == [2, 3, 4, 12, 4, 1, 3]


@pytest.mark.parametrize("copied", [True, False])
def test_strided_inputs_are_copied_unless_asked_not_to(copied):
    a = mx.arange(12, dtype=mx.float32).reshape(3, 4).T
    source = """
    uint i = thread_position_in_grid.x;
    o[i] = a[elem_to_loc(int(i), a_shape, a_strides, a_ndim)];
    p[i] = a[i];
    """
    out, raw = launch(source, [a], outputs="o p", shapes=[(12,)] * 2, ensure_row_contiguous=copied)
    plain = [float(x) for row in a.tolist() for x in row]
    assert out.tolist() == plain and raw.tolist() == (plain if copied else list(range(12)))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != mx.complex64], ids=TYPE_NAMES.get)
def test_every_dtype_goes_in_and_out(dtype):
    a = mx.array([0, 1, 1, 0, 1, 0, 0, 1, 1, 1]).astype(dtype)
    source = "uint i = thread_position_in_grid.x; o[i] = a[i]; p[i] = b;"
    one = mx.array(1).astype(dtype)
    out, scalar = launch(source, [a, one], outputs="o p", shapes=[(10,)] * 2, dtypes=dtype)
    assert out.dtype == dtype and mx.array_equal(out, a) and scalar.tolist() == [1] * 10


def test_init_value_fills_the_outputs():
    source = "uint i = thread_position_in_grid.x; if (i % 2) out[i] += 1;"
    assert launch(source, [mx.zeros(8)], init_value=3).tolist() == [3, 4] * 4


def test_atomic_outputs():
    source = """
    uint i = thread_position_in_grid.x;
    atomic_fetch_add_explicit(&out[i % 4], a[i], memory_order_relaxed);
    """
    a = mx.arange(64, dtype=mx.float32)
    out = launch(source, [a], shapes=[(4,)], grid=64, init_value=0, atomic_outputs=True)
    np.testing.assert_array_equal(np.array(out), np.arange(64).reshape(16, 4).sum(0))


def test_grid_is_counted_in_threads_and_edges_are_ragged():
    """Threadgroups at the edge are smaller; a threadgroup larger than the grid is clipped."""
    source = """
    uint3 p = thread_position_in_grid;
    uint i = p.x + 10 * (p.y + 3 * p.z);
    out[4 * i] = threads_per_threadgroup.x + 100 * threads_per_threadgroup.y;
    out[4 * i + 1] = threadgroups_per_grid.x + 100 * threadgroup_position_in_grid.x;
    out[4 * i + 2] = thread_index_in_threadgroup;
    out[4 * i + 3] = simdgroup_index_in_threadgroup + 100 * simdgroups_per_threadgroup;
    """
    out = launch(
        source, [mx.zeros(8)], shapes=[(60, 4)], dtypes=mx.int32, grid=(10, 3, 2), group=(4, 8, 2)
    )
    out = np.array(out).reshape(2, 3, 10, 4)
    x = np.arange(10)
    width = np.where(x < 8, 4, 2)
    assert (out[..., 0] == width + 300).all()
    assert (out[..., 1] == 3 + 100 * (x // 4)).all()
    z, y = np.arange(2)[:, None, None], np.arange(3)[None, :, None]
    index = x % 4 + width * (y + 3 * z)
    assert (out[..., 2] == index).all()
    assert (out[..., 3] == index // 32 + 100 * ((width * 6 + 31) // 32)).all()
