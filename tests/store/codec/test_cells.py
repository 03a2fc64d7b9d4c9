"""Python objects in cells and in meta_info come back exactly, or are refused by name."""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict, defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.batches import assert_comes_back, assert_same_object, data_proto, dump, load, objects
from verl_rollout_skip.errors import CorruptEntryError, UnsupportedBatchError
from verl_rollout_skip.store.codec import cells
from verl_rollout_skip.store.codec.cells import CellBlobs, blob_view
from verl_rollout_skip.store.codec.numbers import TORCH_DTYPES


def comes_back(value: Any) -> Any:
    """Send one value through JSON text and blobs and compare it with itself; returns what came back."""
    blobs: list[Any] = []
    text = cells.encode(value, blobs, "cell")
    json.loads(text.encode())  # the text is valid JSON in UTF-8 for other readers
    decoded = cells.decode(text, CellBlobs.of([bytes(blob_view(blob)) for blob in blobs]))
    assert_same_object(value, decoded)
    inline = json.loads(json.dumps(cells.encode_inline(value, "meta_info")))
    assert_same_object(value, cells.decode_inline(inline))
    return decoded


def float_of(bits: int) -> float:
    return struct.unpack(">d", bits.to_bytes(8, "big"))[0]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        "",
        "Grüße, 你好 🎈",
        "line\nbreak\x00nul\u2028",
        [],
        {},
        (),
        b"",
        b"\x00\xff$",
        [None, True, False, 1, 1.0, "1"],
        (1, [2, (3,)], {"four": (5,)}),
        {"a": {"b": {"c": [1, {"d": None}]}}},
    ],
    ids=repr,
)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    comes_back(value)


@pytest.mark.parametrize("value", [2**31, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**5000, -(7**3000)], ids=hash)
def test_integers_of_any_size_come_back(value: int) -> None:
    comes_back(value)
    comes_back([value, {"n": value}])
    assert_comes_back(data_proto(x=[value, 1, None]))


@pytest.mark.parametrize(
    "value",
    [0.0, -0.0, 0.1, 5e-324, -1.7976931348623157e308, 1 / 3, math.inf, -math.inf],
)
def test_floats_come_back_to_the_last_bit(value: float) -> None:
    comes_back(value)
    comes_back({"score": [value]})
    assert_comes_back(data_proto(x=[value, None, 1.5]))


@pytest.mark.parametrize("bits", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001, 0x7FFFDEADBEEF0001])
def test_nan_payloads_come_back(bits: int) -> None:
    comes_back(float_of(bits))
    comes_back([{"nan": float_of(bits)}])
    assert_comes_back(data_proto(x=[float_of(bits), None, 1.5]))


LONE_SURROGATES = ["\ud800", "\udc00\ud800", "\ud83d\ude00", "a\udfffb", "😀\ud83d\ude00"]


@pytest.mark.parametrize("text", LONE_SURROGATES, ids=ascii)
def test_lone_surrogates_are_not_joined_to_one_character(text: str) -> None:
    comes_back(text)
    comes_back({"key": [text], text: 1})
    assert_comes_back(data_proto(x=[text, "plain", None], y=[[text], {text: text}, (text,)]))


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", 2: "b"},
        {None: 0, True: 1, 2.5: 2, b"x": 3, (1, "t"): 4},
        {float("nan"): 1, -0.0: 2},
        {np.int64(3): "numpy", np.str_("s"): 1},
        {1: {2: {"three": {4: ()}}}},
        {"1": "text", 1: "number"},
    ],
    ids=repr,
)
def test_dict_keys_that_are_not_strings_come_back(value: dict) -> None:
    comes_back(value)


@pytest.mark.parametrize(
    "value",
    [
        {"$type": "tuple", "items": [1, 2]},
        {"$type": "image"},
        {"$type": None, "other": {"$type": {"$type": []}}},
        [{"$type": "bytes", "blob": 0}, b"real"],
        '{"$type":"tuple","items":[]}',
        {"": 1, "$": 2, "$types": 3},
    ],
    ids=repr,
)
def test_data_that_looks_like_our_tags_is_only_data(value: Any) -> None:
    comes_back(value)


def test_dicts_keep_their_order() -> None:
    value = dict.fromkeys(("z", "a", "m", "A"))
    assert list(comes_back(value)) == ["z", "a", "m", "A"]
    assert list(comes_back({2: 0, 1: 0, "x": (), 0: 0})) == [2, 1, "x", 0]


NUMPY_VALUES = [
    np.bool_(True),
    *(np.dtype(code).type(3) for code in "bBhHiIlLefdFD"),
    np.float32(-0.0),
    np.array([0x7F800001, 0xFFC12345], np.uint32).view(np.float32)[0],
    np.longdouble(1) / 3,
    np.datetime64("2026-01-02T03:04:05.678", "ms"),
    np.datetime64("NaT", "ns"),
    np.timedelta64(-7, "D"),
    np.str_("Grüße"),
    np.str_(""),
    np.str_("nul at the end\x00"),
    np.str_("\ud83d\ude00"),
    np.bytes_(b"raw\x00"),
    np.bytes_(b""),
]


@pytest.mark.parametrize("value", NUMPY_VALUES, ids=lambda value: f"{value.dtype.str}-{value!a}")
def test_numpy_scalars_come_back(value: np.generic) -> None:
    comes_back(value)
    comes_back([{"value": value}])


NUMPY_ARRAYS = [
    *(np.arange(6).astype(code).reshape(2, 3) for code in "?bBhHiIqQefdFD"),
    *(np.arange(4).astype(code) for code in (">i2", ">u8", ">f2", ">f4", ">c16")),
    np.array([0x7FF0000000000001, 1 << 63], np.uint64).view(np.float64),
    np.array(["2026-01-02", "NaT"], "M8[ns]"),
    np.array([1, 2], "m8[25s]"),
    np.array(["2026"], ">M8[Y]"),
    np.array(["", "Grüße", "\ud800"], "U5"),
    np.array(["ab"], ">U2"),
    np.array([b"", b"a\x00b"], "S3"),
    np.zeros(2, "U0"),
    np.array(7),
    np.array("text"),
    np.array(1.5, ">f8"),
    np.zeros((0,), np.float32),
    np.zeros((3, 0, 2), np.int8),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(24).reshape(4, 6)[::2, ::-3],
    np.broadcast_to(np.float32(1), (3, 2)),
]


@pytest.mark.parametrize("value", NUMPY_ARRAYS, ids=lambda value: f"{value.dtype.str}{value.shape}")
def test_numpy_arrays_of_every_kind_come_back(value: np.ndarray) -> None:
    decoded = comes_back(value)
    assert decoded.flags.writeable
    comes_back({"a": [value, value]})


def test_object_arrays_inside_cells_come_back() -> None:
    nested = objects([[1, 2], (3,), None, {"k": np.arange(2)}, b"x"])
    comes_back(nested)
    comes_back(np.array(None, dtype=object))
    comes_back(np.empty((2, 0), dtype=object))
    grid = np.empty((2, 2), dtype=object)
    for index in np.ndindex(grid.shape):
        grid[index] = [index]
    comes_back({"grid": grid})


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_tensors_of_every_dtype_come_back(name: str) -> None:
    dtype = TORCH_DTYPES[name]
    size = torch.empty(0, dtype=dtype).element_size()
    everything = torch.arange(256, dtype=torch.uint8).repeat(size)
    if dtype is torch.bool:
        everything = everything & 1
    tensor = everything.reshape(-1, size).view(dtype).reshape(2, -1)
    comes_back(tensor)
    comes_back([tensor, {"empty": tensor[:0], "width 0": tensor[:, :0], "scalar": tensor[0, 3]}])
    comes_back(tensor.t())
    comes_back(tensor[:, ::5])


def test_tensors_that_are_views_come_back_as_their_values() -> None:
    complex_numbers = torch.tensor([1 + 2j, -3j, 0])
    comes_back(complex_numbers.conj())
    comes_back(complex_numbers.conj().imag)
    comes_back(torch.ones(1).expand(4, 3))
    decoded = comes_back({"weights": torch.ones(2, requires_grad=True)})
    assert not decoded["weights"].requires_grad


@pytest.mark.parametrize("mode", Image.MODES)
@pytest.mark.parametrize("size", [(13, 3), (1, 1), (8, 2)])
def test_images_come_back_pixel_for_pixel_in_every_mode(mode: str, size: tuple[int, int]) -> None:
    count = len(Image.new(mode, size).tobytes())
    image = Image.frombytes(mode, size, np.random.default_rng(0).bytes(count))
    comes_back(image)
    assert_comes_back(data_proto(x=[{"images": [image]}, {"images": []}]))


def palette_images() -> dict[str, Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 9, 4)).astype(np.uint8)
    few = Image.fromarray(pixels[..., :3]).quantize(5)
    one, some, alpha, paired = few.copy(), few.copy(), few.copy(), few.convert("PA")
    one.info["transparency"] = 3
    some.info["transparency"] = bytes([0, 128])
    alpha.putpalette(bytes(range(40)), "RGBA")
    paired.putpalette(bytes(range(40)), "RGBA")
    return {
        "five colors": few,
        "256 colors": Image.fromarray(pixels[..., :3]).convert("P", palette=Image.Palette.ADAPTIVE),
        "one transparent color": one,
        "partly transparent colors": some,
        "colors with alpha": alpha,
        "of four channels": Image.fromarray(pixels).quantize(5),
        "with an alpha channel": few.convert("PA"),
        "alpha twice": paired,
        "no colors": Image.new("P", (3, 2)),
    }


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("image", palette_images().values(), ids=palette_images())
def test_images_keep_their_palette_and_their_transparency(image: Image.Image) -> None:
    comes_back(image)
    assert_comes_back(data_proto(x=[{"images": [image]}, {"images": [image.copy()]}]))


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_an_image_opened_from_a_file_comes_back_as_an_image(tmp_path: Path, mode: str) -> None:
    """With the metadata of its file: a transparent color, its orientation, its resolution."""
    image = (
        Image.new("I;16", (4, 3), 40_000) if mode == "I;16" else Image.new("RGB", (4, 3), (10, 20, 30)).convert(mode)
    )
    options: dict[str, Any] = {} if mode in ("LA", "RGBA") else {"transparency": (1, 2, 3) if mode == "RGB" else 0}
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "picture.png", dpi=(300, 300), exif=exif, **options)
    with Image.open(tmp_path / "picture.png") as image:
        assert image.mode == mode
        decoded = comes_back(image)
        assert set(decoded.info) == {"dpi", "exif", *options}
        assert ImageOps.exif_transpose(decoded).size == (3, 4)
    assert type(decoded) is Image.Image


def test_what_an_image_says_of_itself_is_kept_as_far_as_it_is_plain() -> None:
    image = Image.new("L", (2, 2))
    image.info = {"plain": [1, (2.5, "a", None, b"b")], "class": object(), "mixed": (1, object())}
    [cell] = load(dump(data_proto(x=[image])))[0].non_tensor_batch["x"]
    assert cell.info == {"plain": [1, (2.5, "a", None, b"b")]}


def test_an_image_in_an_unknown_mode_is_refused_by_that_mode() -> None:
    image = Image.new("RGB", (2, 2))
    image._mode = "BGR;24"
    with pytest.raises(UnsupportedBatchError, match=r"x\[0\]\['images'\]\[0\]: it is a PIL image of mode 'BGR;24'"):
        dump(data_proto(x=[{"images": [image]}]))


def test_rows_that_share_one_object_share_one_object_again() -> None:
    shared = {"pixel_values": torch.arange(6.0).reshape(2, 3), "grid": np.arange(3)}
    array = np.arange(4)
    proto = data_proto(x=[shared, {"own": 1}, shared, shared], y=[array, array, [1], [1]])
    loaded, _ = load(dump(proto))
    x, y = loaded.non_tensor_batch["x"], loaded.non_tensor_batch["y"]
    assert x[0] is x[2] is x[3]
    assert y[0] is y[1]
    assert y[2] is not y[3]
    assert_comes_back(proto)


def test_equal_but_separate_objects_stay_separate() -> None:
    proto = data_proto(x=[{"a": [1]} for _ in range(4)], y=[[] for _ in range(4)])
    loaded, _ = load(dump(proto))
    loaded.non_tensor_batch["x"][0]["a"].append("changed")
    assert loaded.non_tensor_batch["x"][1] == {"a": [1]}
    assert_comes_back(proto)


@pytest.mark.parametrize(
    "cell",
    [
        b"the very same bytes",
        Image.new("RGB", (3, 2), (1, 2, 3)),
        (b"in", "a tuple"),
        "text \ud800",
        (),
        2**80,
        np.float32(1.5),
        torch.ones(3),
        {"image": Image.new("L", (2, 2))},
    ],
    ids=lambda cell: type(cell).__name__,
)
def test_any_cell_may_be_repeated_over_rows(cell: Any) -> None:
    assert_comes_back(data_proto(x=[cell, cell, cell]))
    assert_comes_back(data_proto(x=[None, cell, cell, {"shared": 1}]))


def test_repeated_images_are_stored_once() -> None:
    noise = torch.randn(3, 200, 200)
    one = dump(data_proto(x=[{"pixel_values": noise}] + [{}] * 7))
    eight = dump(data_proto(x=[{"pixel_values": noise}] * 8))
    assert len(eight) < len(one) * 1.05


def test_fixed_width_text_and_bytes_come_back() -> None:
    assert_comes_back(data_proto(x=np.array(["a", "", "é\x00b"]), y=np.array([b"a", b"a", b"\xff"])))
    assert_comes_back(data_proto(x=np.array([["a", "b"], ["c", "ddd"]], ">U7"), y=np.array([[b"a"], [b"a"]], "S4")))
    assert_comes_back(data_proto(x=np.zeros((2, 0), "U3"), y=np.zeros(2, "U0"), z=np.zeros((2, 1), "S0")))
    assert_comes_back(data_proto(x=np.array(["\ud83d\ude00", "\ud800"])))


@pytest.mark.parametrize(
    "column",
    [
        ["text", None, ""],
        [1, None, -(2**63)],
        [1.5, None, -0.0],
        [True, None, False],
        [None, None, None],
        [1, 1.0, True],
        ["1", 1, None],
        [float("nan"), float("nan"), None],
    ],
    ids=repr,
)
def test_columns_of_simple_values_with_gaps_come_back(column: list) -> None:
    assert_comes_back(data_proto(x=column))


def test_object_arrays_of_several_dimensions_come_back() -> None:
    grid = np.empty((3, 2), dtype=object)
    for index in np.ndindex(grid.shape):
        grid[index] = [index, [1, 2]]
    assert_comes_back(data_proto(x=grid))
    arrays = np.empty((2, 1, 2), dtype=object)
    for index in np.ndindex(arrays.shape):
        arrays[index] = np.arange(3)
    assert_comes_back(data_proto(x=arrays))
    assert_comes_back(data_proto(x=np.array([["a", None], [b"c", 2**70]], dtype=object)))
    assert_comes_back(data_proto(x=np.empty((2, 0), dtype=object), y=np.array([[1], [None]], dtype=object)))


class Custom:
    pass


class Text(str):
    __slots__ = ()


SELF_CONTAINING: list[Any] = []
SELF_CONTAINING.append(SELF_CONTAINING)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1, 2}, "set"),
        (lambda: None, "function"),
        (Custom(), "Custom"),
        (Text("a subclass"), "Text"),
        (datetime(2026, 1, 1), "datetime.datetime"),
        (1j, "complex"),
        (range(3), "range"),
        (bytearray(b"x"), "bytearray"),
        (OrderedDict(a=1), "OrderedDict"),
        (defaultdict(int), "defaultdict"),
        (np.zeros(2, [("a", "i4")]), "numpy.ndarray"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
        (np.array(["x"], dtype=np.dtypes.StringDType()), "numpy.ndarray"),
        (torch.eye(2).to_sparse(), "torch.Tensor"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_what_cannot_be_stored_is_refused_with_its_key_and_type(value: Any, named: str) -> None:
    with pytest.raises(UnsupportedBatchError, match=named) as error:
        dump(data_proto(extra_info=[{}, {"deep": [value]}]))
    assert "extra_info[1]['deep'][0]" in str(error.value)
    with pytest.raises(UnsupportedBatchError, match=named):
        cells.encode_inline({"key": value}, "meta_info")


@pytest.mark.parametrize("value", [SELF_CONTAINING, {"a": SELF_CONTAINING}, ((),)], ids=["list", "dict", "tuple"])
def test_a_value_that_contains_itself_is_refused(value: Any) -> None:
    if value == ((),):
        for _ in range(200):
            value = (value,)
    with pytest.raises(UnsupportedBatchError, match=r"tools_kwargs\[0\].* (levels deep|contains itself)"):
        dump(data_proto(tools_kwargs=[value]))


def test_a_hundred_levels_are_deep_enough() -> None:
    value: Any = "bottom"
    for level in range(95):
        value = [value] if level % 2 else {"down": value}
    comes_back(value)
    comes_back((value,))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nothing",
        "[" * 100_000,
        '{"$type":"set","items":[]}',
        '{"$type":["tuple"]}',
        '{"$type":null}',
        '{"$type":"tuple"}',
        '{"$type":"tuple","items":5}',
        '{"$type":"tuple","items":"ab"}',
        '{"$type":"tuple","items":{"a":1}}',
        '{"$type":"dict","items":[1]}',
        '{"$type":"dict","items":[[1,2,3]]}',
        '{"$type":"dict","items":[[[],1]]}',
        '{"$type":"str","hex":"ff"}',
        '{"$type":"str","hex":"zz"}',
        '{"$type":"int","hex":5}',
        '{"$type":"int","hex":"__import__"}',
        '{"$type":"float","hex":"00"}',
        '{"$type":"float"}',
        '{"$type":"bytes","blob":1}',
        '{"$type":"bytes","blob":-1}',
        '{"$type":"bytes","blob":true}',
        '{"$type":"numpy","dtype":"O","hex":""}',
        '{"$type":"numpy","dtype":"|O8","hex":"0000000000000000"}',
        '{"$type":"numpy","dtype":"<i4","hex":""}',
        '{"$type":"numpy","dtype":"<i4","hex":"0000000000000000"}',
        '{"$type":"numpy","dtype":"<i3","hex":"000000"}',
        '{"$type":"numpy","dtype":"<M8[q]","hex":"0000000000000000"}',
        '{"$type":"numpy","dtype":"<U99999999999","hex":""}',
        '{"$type":"numpy","dtype":7,"hex":"00"}',
        '{"$type":"ndarray","dtype":"<i4","shape":[2],"blob":0}',
        '{"$type":"ndarray","dtype":"|u1","shape":[-1],"blob":0}',
        '{"$type":"ndarray","dtype":"|u1","shape":[1.0],"blob":0}',
        '{"$type":"ndarray","dtype":"|u1","shape":1,"blob":0}',
        '{"$type":"ndarray","dtype":"O","shape":[2],"items":[1]}',
        '{"$type":"ndarray","dtype":"O","shape":[1],"items":5}',
        '{"$type":"ndarray","dtype":"|S0","shape":[281474976710655],"blob":1}',
        '{"$type":"tensor","dtype":"float32","shape":[2],"blob":0}',
        '{"$type":"tensor","dtype":"qint8","shape":[1],"blob":0}',
        '{"$type":"tensor","dtype":[],"shape":[1],"blob":0}',
        '{"$type":"image","mode":"RGB","size":[1,1],"blob":0}',
        '{"$type":"image","mode":"P","size":[1,1],"blob":0}',
        '{"$type":"image","mode":"P","size":[1,1],"blob":0,"palette":{"mode":"XYZ","blob":0}}',
        '{"$type":"image","mode":"P","size":[1,1],"blob":0,"palette":[0]}',
        '{"$type":"image","mode":"L","size":[1,1],"blob":0,"palette":{"mode":"RGB","blob":0}}',
        '{"$type":"image","mode":"L","size":[1,1],"blob":0,"info":[1]}',
        '{"$type":"image","mode":"BGR;24","size":[1,1],"blob":0}',
        '{"$type":"image","mode":["L"],"size":[1,1],"blob":0}',
        '{"$type":"image","mode":"L","size":[1],"blob":0}',
        '{"$type":"image","mode":"L","size":[100000000,100000000],"blob":0}',
        '[{"a":{"$type":"float","hex":"00"}}]',
    ],
    ids=lambda text: text[:60],
)
def test_malformed_cells_are_corruption_and_never_run(text: str) -> None:
    with pytest.raises(CorruptEntryError):
        cells.decode(text, CellBlobs.of([b"x"]))


@pytest.mark.parametrize(
    "stored", [{}, {"json": "1"}, {"json": "1", "blobs": 3}, {"json": "1", "blobs": ["*"]}, {"json": 1, "blobs": []}]
)
def test_malformed_meta_info_is_corruption(stored: dict) -> None:
    with pytest.raises(CorruptEntryError):
        cells.decode_inline(stored)
