"""PyTorch's files are read without PyTorch: the same numbers, and nothing in them is run."""

import pickle
import zipfile

import ml_dtypes
import numpy as np
import published_files as published
import pytest
from published_files import named, number, pickled_dict, pickled_tensor, text, write_archive, write_torch

from spec_jax.drafting.torch_file import TorchFile

DATA = np.arange(12, dtype=np.float32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.pt"


def one(path, *description, data=DATA, **options):
    """A file with one tensor "x" over one storage "0"."""
    entry = pickled_tensor("0", "FloatStorage", *description)
    write_archive(path, pickled_dict({"x": entry}), {"data/0": data.tobytes()}, **options)
    return TorchFile(path)


@pytest.mark.parametrize("dtype", published.STORAGES)
def test_types(dtype, path):
    array = np.array([[0, 1, 0], [1, 1, 0]]).astype(dtype)
    write_torch(path, {"x": array, "scalar": array[0, 1]})
    file = TorchFile(path)
    assert file.shapes == {"x": (2, 3), "scalar": ()}
    assert file.read("x").dtype == dtype
    np.testing.assert_array_equal(file.read("x"), array)
    np.testing.assert_array_equal(file.read("scalar"), array[0, 1])


def test_parts_of_a_storage(path):
    np.testing.assert_array_equal(one(path, 12, 1, (2, 3), (4, 1)).read("x"), DATA.reshape(3, 4)[:2, 1:])
    np.testing.assert_array_equal(one(path, 12, 0, (4, 3), (1, 4)).read("x"), DATA.reshape(3, 4).T)
    np.testing.assert_array_equal(one(path, 12, 11, (5,), (0,)).read("x"), np.full(5, 11))
    assert one(path, 12, 12, (0, 3), (3, 1)).read("x").shape == (0, 3)


@pytest.mark.parametrize(
    "description",
    [
        (12, 0, (13,), (1,)),
        (12, 1, (12,), (1,)),
        (12, 0, (2, 7), (6, 1)),
        (12, 13, (0,), (1,)),
        (12, 0, (2, 2), (2**31 - 1, 1)),
        (12, -1, (2,), (1,)),
        (12, 0, (-2,), (1,)),
        (12, 0, (2,), (-1,)),
        (12, 0, (2, 2), (1,)),
        (12, 0, (1,) * 9, (1,) * 9),
        (-12, 0, (0,), (1,)),
    ],
)
def test_tensors_beyond_their_storage(description, path):
    with pytest.raises(ValueError, match="x.*(damaged|not described as a tensor)"):
        one(path, *description)


def test_a_storage_of_another_size(path):
    file = one(path, 12, 0, (12,), (1,), data=DATA[:-1])
    with pytest.raises(ValueError, match="the storage of x has 44 bytes, not 12 numbers of float32"):
        file.read("x")


def test_compressed_members(path):
    with pytest.raises(ValueError, match="is compressed, which PyTorch's files are not"):
        one(path, 12, 0, (12,), (1,), compress=True)


# --- What a pickle may not do -----------------------------------------------------------------------------------------


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


FORBIDDEN = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("torch", "load"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch", "float32"),
    ("collections", "OrderedDict.update"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("spec_jax.drafting.torch_file", "TorchFile"),
    ("argparse", "Namespace"),
]


@pytest.mark.parametrize(("module", "name"), FORBIDDEN)
def test_forbidden_names(module, name, path, tmp_path):
    stolen = tmp_path / "ran"
    call = named(module, name) + b"(" + text(f"touch {stolen}") + b"tR"
    write_archive(path, pickled_dict({"x": call}), {})
    with pytest.raises(ValueError, match=f"asks for {module}.{name}, which is not allowed"):
        TorchFile(path)
    assert not stolen.exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_calls_that_python_pickles(protocol, path, tmp_path):
    stolen = tmp_path / "ran"
    write_archive(path, pickle.dumps({"x": Calls(open, str(stolen), "w")}, protocol), {})
    with pytest.raises(ValueError, match="asks for (_?io|builtins).open, which is not allowed"):
        TorchFile(path)
    assert not stolen.exists()


STATE = b"}(" + text("items") + number(1) + text("keys") + number(1) + b"ub"
TENSOR = pickled_tensor("0", "FloatStorage", 12, 0, (12,), (1,))
REBUILD = named("torch._utils", "_rebuild_tensor_v2")


def test_attributes_of_the_dict_are_ignored(path):
    """PyTorch itself stores `_metadata` there."""
    content = pickled_dict({"x": TENSOR})[:-1] + STATE + b"."
    write_archive(path, content, {"data/0": DATA.tobytes()})
    np.testing.assert_array_equal(TorchFile(path).read("x"), DATA)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02" + TENSOR + b".", "holds a tuple, not a dict"),
        (pickled_dict({"x": number(3)}), "the entry 'x' is a int; only tensors"),
        (pickled_dict({"x": text("tensor")}), "the entry 'x' is a str"),
        (pickled_dict({"x": REBUILD}), "the entry 'x' is a _RebuildTensor"),
        (pickled_dict({"x": pickled_dict({})[2:-1]}), "the entry 'x' is a OrderedDict"),
        (pickled_dict({"x": b"(" + text("tensor") + b"N" * 4 + b"t"}), "x is not described as a tensor"),
        (pickled_dict({"x": REBUILD + b"(" + b"N" * 6 + b"tR"}), "x is not described as a tensor"),
        (pickled_dict({"x": named("torch", "FloatStorage") + b")R"}), r"damaged \(TypeError\)"),
        (pickled_dict({"x": REBUILD + STATE}), r"damaged \("),
        (pickled_dict({"x": TENSOR})[:-9], r"damaged \("),
        (b"\x80\x02r\xff\xff\xff\x7f.", r"damaged \("),
        (b"", r"damaged \(EOFError\)"),
        (b"\x80\x02(" + number(1) + TENSOR + b"d.", "the entry of a int is a tuple"),
    ],
)
def test_pickles_that_are_no_state_dict(content, message, path):
    write_archive(path, content, {"data/0": DATA.tobytes()})
    with pytest.raises(ValueError, match=message):
        TorchFile(path)


# --- Damaged files ----------------------------------------------------------------------------------------------------


def test_truncated(path):
    write_torch(path, {"x": DATA})
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="truncated or not a file of PyTorch 1.6"):
        TorchFile(path)


def test_flipped_bits(path):
    write_torch(path, {"x": DATA})
    content = path.read_bytes()
    place = content.index(DATA.tobytes()) + 5
    path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    with pytest.raises(ValueError, match="data/0 is damaged.*fetch it again"):
        TorchFile(path).read("x")


def test_absent_members(path):
    write_archive(path, pickled_dict({"x": TENSOR}), {})
    with pytest.raises(ValueError, match="lacks data/0"):
        TorchFile(path).read("x")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(ValueError, match="has no single data.pkl"):
        TorchFile(path)


def test_big_endian(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled_dict({}))
        archive.writestr("a/byteorder", b"big")
    with pytest.raises(ValueError, match="not written on a little-endian machine"):
        TorchFile(path)


def test_types_are_named_as_in_safetensors(path):
    write_torch(path, {"x": DATA.astype(ml_dtypes.bfloat16), "ids": np.arange(3)})
    assert TorchFile(path).problems(["x", "ids"], ("BF16",)) == ["ids has the type I64, not one of BF16"]


def test_what_pytorch_itself_writes(path):
    torch = pytest.importorskip("torch")
    whole = torch.arange(20.0).reshape(4, 5)
    state = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).state_dict()
    state |= {
        "part": whole[1:3, 2:],
        "turned": whole.t(),
        "half": whole.half(),
        "brain": whole.bfloat16(),
        "ids": torch.arange(5),
        "members": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "expanded": torch.ones(1).expand(3),
        "scalar": torch.tensor(3.5),
    }
    torch.save(state, path)
    file = TorchFile(path)
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name, tensor in state.items():
        np.testing.assert_array_equal(file.read(name).astype(np.float64), tensor.detach().double().numpy())
