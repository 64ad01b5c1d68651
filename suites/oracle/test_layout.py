"""Cache layouts against their formulas, written out as loops."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.bits import bit_equal, bits
from oracle.kinds import KVLayout, Role, VLayout
from oracle.layout import (
    CacheGeometry,
    LayoutError,
    cache_axes,
    cache_shape,
    element_index,
    geometry_of,
    offset_of,
    pack,
    page_of,
    read_slots,
    slot_of,
    unpack,
    vector_width,
    write_slots,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]
FORMS = [
    *itertools.product((KVLayout.LINEAR, KVLayout.NHD, KVLayout.HND), Role, (VLayout.V5D,)),
    (KVLayout.SHUFFLE_5D, Role.K, VLayout.V5D),
    (KVLayout.SHUFFLE_5D, Role.V, VLayout.V5D),
    (KVLayout.SHUFFLE_5D, Role.V, VLayout.V4D),
]
every_form = pytest.mark.parametrize(("layout", "role", "v_layout"), FORMS, ids=lambda part: str(part))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def example(layout: KVLayout, role: Role, v_layout: VLayout, dtype: torch.dtype = torch.bfloat16) -> CacheGeometry:
    return CacheGeometry(layout, role, 3, 2, 16, 32, dtype, v_layout)


@every_form
@given(blocks=st.integers(0, 3), heads=st.integers(1, 3), vectors=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_a_geometry_is_found_from_its_shape(
    layout: KVLayout, role: Role, v_layout: VLayout, blocks: int, heads: int, vectors: tuple[int, int]
) -> None:
    page, dim = (8 * count for count in vectors)
    g = CacheGeometry(layout, role, blocks, heads, page, dim, torch.bfloat16, v_layout)
    assert len(cache_axes(layout, role, v_layout).split()) == len(g.shape)
    assert geometry_of(g.shape, g.dtype, layout, role, v_layout, page) == g
    with pytest.raises(LayoutError, match="allowed: "):
        geometry_of((*g.shape, 1), g.dtype, layout, role, v_layout, page)


def test_a_shape_of_no_geometry_is_refused() -> None:
    for shape, layout, page in (((17, 2, 8), KVLayout.LINEAR, 16), ((3, 2, 4, 16, 4), KVLayout.SHUFFLE_5D, 1)):
        with pytest.raises(LayoutError, match=r"\]; allowed: \["):
            geometry_of(shape, torch.bfloat16, layout, Role.K, page_size=page)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bit patterns, NaN payloads included (0 and 1 for bool)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    shape_in_bytes = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape_in_bytes, generator=generator, dtype=torch.uint8).view(dtype)


def position(g: CacheGeometry, s: int, h: int, d: int) -> tuple[int, ...]:
    """Where the published formulas put element [s, h, d]; x in bytes is 16."""
    x = 16 // g.dtype.itemsize
    b, o = s // g.page_size, s % g.page_size
    if g.layout is KVLayout.LINEAR:
        return s, h, d
    if g.layout is KVLayout.NHD:
        return b, o, h, d
    if g.layout is KVLayout.HND:
        return b, h, o, d
    if g.role is Role.K:
        return b, h, d // x, o, d % x
    if g.v_layout is VLayout.V5D:
        return b, h, o // x, d, o % x
    return b, h, d, o


def test_shapes() -> None:
    def shape(layout: KVLayout, role: Role, dtype: torch.dtype, v: VLayout = VLayout.V5D) -> tuple[int, ...]:
        return cache_shape(layout, role, 5, 4, 64, 128, dtype, v)

    assert shape(KVLayout.LINEAR, Role.K, torch.bfloat16) == (320, 4, 128)
    assert shape(KVLayout.NHD, Role.V, torch.bfloat16) == (5, 64, 4, 128)
    assert shape(KVLayout.HND, Role.V, torch.bfloat16) == (5, 4, 64, 128)
    assert shape(KVLayout.SHUFFLE_5D, Role.K, torch.bfloat16) == (5, 4, 16, 64, 8)
    assert shape(KVLayout.SHUFFLE_5D, Role.K, torch.uint8) == (5, 4, 8, 64, 16)
    assert shape(KVLayout.SHUFFLE_5D, Role.V, torch.float16) == (5, 4, 8, 128, 8)
    assert shape(KVLayout.SHUFFLE_5D, Role.V, torch.float8_e4m3fnuz) == (5, 4, 4, 128, 16)
    assert shape(KVLayout.SHUFFLE_5D, Role.V, torch.bfloat16, VLayout.V4D) == (5, 4, 128, 64)


def test_vector_width_is_sixteen_bytes() -> None:
    widths = {torch.uint8: 16, torch.float8_e5m2: 16, torch.bfloat16: 8, torch.float32: 4, torch.float64: 2}
    assert {dtype: vector_width(dtype) for dtype in widths} == widths


@every_form
@every_dtype
def test_pack_unpack_and_single_slots(layout: KVLayout, role: Role, v_layout: VLayout, dtype: torch.dtype) -> None:
    g = example(layout, role, v_layout, dtype)
    linear = any_bits((g.num_slots, g.heads, g.dim), dtype)
    cache = pack(linear, g)
    assert cache.shape == g.shape
    assert cache.dtype == dtype
    assert cache.is_contiguous()
    assert bit_equal(unpack(cache, g), linear).all()
    everything = torch.arange(g.num_slots)
    flat = bits(cache).view(-1)
    assert torch.equal(flat[element_index(everything, g)], bits(linear))
    slots = torch.tensor([47, 0, 16, 15, 31], dtype=torch.int32)
    assert bit_equal(read_slots(cache, slots, g), linear[slots.long()]).all()


@every_form
def test_pack_follows_the_formulas(layout: KVLayout, role: Role, v_layout: VLayout) -> None:
    g = example(layout, role, v_layout)
    linear = torch.arange(g.num_slots * g.heads * g.dim, dtype=torch.int16).view(g.num_slots, g.heads, g.dim)
    cache = bits(pack(linear.view(g.dtype), g)).tolist()
    expected = linear.tolist()
    for s, h, d in itertools.product(range(g.num_slots), range(g.heads), range(g.dim)):
        found = cache
        for index in position(g, s, h, d):
            found = found[index]
        assert found == expected[s][h][d]


@every_form
def test_element_index_follows_the_formulas(layout: KVLayout, role: Role, v_layout: VLayout) -> None:
    g = example(layout, role, v_layout, torch.float8_e4m3fn)
    index = element_index(torch.tensor([33, 7]), g)
    assert index.dtype == torch.int64
    for t, s in enumerate((33, 7)):
        for h, d in itertools.product(range(g.heads), range(g.dim)):
            offset = 0
            for size, i in zip(g.shape, position(g, s, h, d), strict=True):
                offset = offset * size + i
            assert int(index[t, h, d]) == offset


@every_form
def test_writing_slots_touches_nothing_else(layout: KVLayout, role: Role, v_layout: VLayout) -> None:
    g = example(layout, role, v_layout)
    linear = any_bits((g.num_slots, g.heads, g.dim), g.dtype)
    cache = pack(linear, g)
    slots = torch.tensor([40, 3, 17])
    values = any_bits((3, g.heads, g.dim), g.dtype, seed=1)
    write_slots(cache, slots, values, g)
    linear[slots] = values
    assert bit_equal(unpack(cache, g), linear).all()


@every_form
def test_strided_caches(layout: KVLayout, role: Role, v_layout: VLayout) -> None:
    """A cache that is a window of something larger is used in place, its surroundings untouched."""
    g = example(layout, role, v_layout)
    linear = any_bits((g.num_slots, g.heads, g.dim), g.dtype)
    around = torch.full((g.shape[0], 2, *(size + 1 for size in g.shape[1:])), 7, dtype=torch.int16)
    window = around[(slice(None), 1, *(slice(1, None) for _ in g.shape[1:]))].view(g.dtype)
    assert not window.is_contiguous()
    write_slots(window, torch.arange(g.num_slots), linear, g)
    assert bit_equal(window, pack(linear, g)).all()
    assert bit_equal(unpack(window, g), linear).all()
    assert bit_equal(read_slots(window, torch.tensor([5, 20]), g), linear[[5, 20]]).all()
    bits(window).fill_(7)
    assert (around == 7).all()


def test_slots_beyond_two_gibi_elements() -> None:
    """Addresses are 64-bit, and a slot of a huge pool costs no pass over the pool."""
    g = CacheGeometry(KVLayout.SHUFFLE_5D, Role.K, 1 << 17, 8, 64, 128, torch.bfloat16)
    slots = torch.tensor([g.num_slots - 1, 0], dtype=torch.int32)
    index = element_index(slots, g)
    assert int(index[0, -1, -1]) == g.num_slots * 8 * 128 - 1
    assert int(index.max()) > 1 << 32
    assert int(index.min()) == 0


sizes = st.integers(1, 5)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(FORMS), st.sampled_from(DTYPES), sizes, sizes, sizes, sizes, st.integers(0, 99))
def test_any_allowed_size_round_trips(
    form: tuple[KVLayout, Role, VLayout],
    dtype: torch.dtype,
    blocks: int,
    heads: int,
    page: int,
    dim: int,
    seed: int,
) -> None:
    layout, role, v_layout = form
    if layout is KVLayout.SHUFFLE_5D and role is Role.K:
        dim *= vector_width(dtype)
    if layout is KVLayout.SHUFFLE_5D and role is Role.V and v_layout is VLayout.V5D:
        page *= vector_width(dtype)
    g = CacheGeometry(layout, role, blocks, heads, page, dim, dtype, v_layout)
    linear = any_bits((g.num_slots, heads, dim), dtype, seed)
    cache = pack(linear, g)
    assert bit_equal(unpack(cache, g), linear).all()
    assert bit_equal(pack(unpack(cache, g), g), cache).all()
    addresses = element_index(torch.arange(g.num_slots), g).reshape(-1)
    assert torch.equal(addresses.sort().values, torch.arange(linear.numel()))


def test_an_empty_pool_and_no_slots() -> None:
    g = CacheGeometry(KVLayout.SHUFFLE_5D, Role.V, 0, 2, 16, 8, torch.bfloat16)
    none = torch.empty(0, dtype=torch.int64)
    empty = torch.empty(0, 2, 8, dtype=torch.bfloat16)
    cache = pack(empty, g)
    assert cache.shape == (0, 2, 2, 8, 8)
    assert unpack(cache, g).shape == (0, 2, 8)
    assert read_slots(cache, none, g).shape == (0, 2, 8)
    write_slots(cache, none, empty, g)


def test_slot_arithmetic() -> None:
    for slot in range(40):
        assert slot_of(page_of(slot, 16), offset_of(slot, 16), 16) == slot
    slots = torch.arange(40)
    assert torch.equal(slot_of(page_of(slots, 16), offset_of(slots, 16), 16), slots)
    assert (page_of(33, 16), offset_of(33, 16)) == (2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 36}, r"^dim: 36, allowed are multiples of x = 8 for k in shuffle_5d of torch\.bfloat16$"),
        ({"dim": 40, "dtype": torch.uint8}, "^dim: 40, allowed are multiples of x = 16"),
        ({"role": Role.V, "page_size": 12}, "^page_size: 12, allowed are multiples of x = 8 for v"),
        ({"page_size": 0}, "^page_size: 0, allowed are integers >= 1$"),
        ({"heads": 0}, "^heads: 0, allowed"),
        ({"num_blocks": -1}, "^num_blocks: -1, allowed are integers >= 0$"),
        ({"dtype": torch.complex128}, r"^dtype: torch\.complex128 has 16 bytes, allowed are 1, 2, 4 and 8$"),
    ],
)
def test_impossible_geometries_name_the_field(changes: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {
        "layout": KVLayout.SHUFFLE_5D,
        "role": Role.K,
        "num_blocks": 3,
        "heads": 2,
        "page_size": 16,
        "dim": 32,
        "dtype": torch.bfloat16,
    }
    with pytest.raises(LayoutError, match=message):
        CacheGeometry(**{**fields, **changes})  # type: ignore[arg-type]


def test_only_the_split_axis_must_be_a_multiple() -> None:
    CacheGeometry(KVLayout.SHUFFLE_5D, Role.K, 1, 1, 1, 32, torch.bfloat16)
    CacheGeometry(KVLayout.SHUFFLE_5D, Role.V, 1, 1, 16, 33, torch.bfloat16)
    CacheGeometry(KVLayout.SHUFFLE_5D, Role.V, 1, 1, 1, 33, torch.bfloat16, VLayout.V4D)
    CacheGeometry(KVLayout.NHD, Role.V, 1, 1, 3, 33, torch.bfloat16)


def test_misuse_is_refused_in_one_line() -> None:
    g = example(KVLayout.SHUFFLE_5D, Role.K, VLayout.V5D)
    linear = torch.zeros(48, 2, 32, dtype=torch.bfloat16)
    cache = pack(linear, g)
    for slot in (-1, 48):
        with pytest.raises(LayoutError, match=rf"^slots: {slot}, allowed are 0 \.\. 47$"):
            read_slots(cache, torch.tensor([0, slot]), g)
    with pytest.raises(LayoutError, match=r"^slots: 3 given, 2 distinct, allowed is each one once$"):
        write_slots(cache, torch.tensor([4, 5, 4]), linear[:3], g)
    with pytest.raises(LayoutError, match=r"^slots: torch\.float32 of shape \(1,\), allowed is int32 or"):
        element_index(torch.tensor([1.0]), g)
    with pytest.raises(LayoutError, match=r"^slots: torch\.int64 of shape \(\), allowed is"):
        read_slots(cache, torch.tensor(1), g)
    with pytest.raises(LayoutError, match=r"^values: torch\.bfloat16 of shape \[2, 2, 32\], allowed is .*\[1, 2"):
        write_slots(cache, torch.tensor([4]), linear[:2], g)
    with pytest.raises(LayoutError, match=r"^linear: torch\.float16 of shape .* allowed is torch\.bfloat16"):
        pack(linear.half(), g)
    with pytest.raises(LayoutError, match=r"^cache: .* of shape \[48, 2, 32\], allowed is .* \[3, 2, 4, 16, 8\]$"):
        unpack(linear, g)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_form
def test_a_gpu_packs_alike(layout: KVLayout, role: Role, v_layout: VLayout) -> None:
    g = example(layout, role, v_layout, torch.float8_e4m3fn)
    linear = any_bits((g.num_slots, g.heads, g.dim), g.dtype)
    cache = pack(linear.cuda(), g)
    assert bit_equal(cache.cpu(), pack(linear, g)).all()
    slots = torch.tensor([9, 30])
    write_slots(cache, slots, linear[[1, 2]], g)
    assert bit_equal(read_slots(cache, slots, g).cpu(), linear[[1, 2]]).all()
