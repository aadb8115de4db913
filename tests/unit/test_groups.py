"""Groups of parameters: every parameter is in one group, and every unit leases all that its forward needs."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from swapper.modules.groups import MERGE_BELOW_BYTES, Group, Unit, largest_working_set, partition

KIB = 1 << 10


class Leaf(nn.Module):
    """A module with parameters of the given sizes in bytes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        for number, nbytes in enumerate(sizes):
            self.register_parameter(f"w{number}", nn.Parameter(torch.empty(nbytes, dtype=torch.uint8), False))

    def forward(self) -> None: ...


class OtherLeaf(Leaf):
    pass


class Branch(nn.Module):
    """A module with children, and parameters of its own."""

    def __init__(self, children: list[nn.Module], *sizes: int) -> None:
        super().__init__()
        for number, child in enumerate(children):
            self.add_module(f"c{number}", child)
        for number, nbytes in enumerate(sizes):
            self.register_parameter(f"w{number}", nn.Parameter(torch.empty(nbytes, dtype=torch.uint8), False))

    def forward(self) -> None: ...


sizes = st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(1, 700 * KIB)), max_size=3)
leaves = st.builds(lambda cls, sizes: cls(*sizes), st.sampled_from([Leaf, OtherLeaf]), sizes)


def branches(children: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    several = st.lists(children, max_size=4)
    return st.one_of(
        st.builds(lambda children, sizes: Branch(children, *sizes), several, sizes),
        several.map(nn.ModuleList),
        several.map(lambda children: nn.Sequential(*children)),
        several.map(lambda children: nn.ModuleDict({str(i): child for i, child in enumerate(children)})),
    )


def trees() -> st.SearchStrategy[nn.Module]:
    """Modules in which every module and every parameter has one place."""
    return st.builds(lambda child, sizes: Branch([child], *sizes), st.recursive(leaves, branches, max_leaves=12), sizes)


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Modules in which some parameters are tied, and some modules stand in two places."""
    model = draw(trees())
    owners = [module for module in model.modules() if module._parameters]
    for _ in range(draw(st.integers(0, 2)) if owners else 0):
        source, target = draw(st.sampled_from(owners)), draw(st.sampled_from(owners))
        target._parameters[next(iter(target._parameters))] = next(iter(source._parameters.values()))
    holders = [module for module in model.modules() if isinstance(module, Branch)]
    for _ in range(draw(st.integers(0, 1))):
        inner = draw(st.sampled_from([module for module in model.modules() if module is not model] or [Leaf(1)]))
        holder = draw(st.sampled_from(holders))
        if all(module is not holder for module in inner.modules()):
            holder.add_module("shared", inner)
    return model


def repeats(module: nn.Module) -> bool:
    """Whether the children of `module` are units with all below them."""
    counts = Counter(type(child) for child in module.children())
    return isinstance(module, nn.ModuleList | nn.Sequential) and max(counts.values(), default=0) > 1


def list_children(model: nn.Module) -> list[nn.Module]:
    """The outermost children of lists of like children, without those that are lists themselves."""
    found: list[nn.Module] = []
    for child in model.children():
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        found += [child] if repeats(model) and is_called else list_children(child)
    return found


def ids(parameters) -> set[int]:
    return {id(parameter) for parameter in parameters}


def held(unit: Unit, groups: list[Group]) -> set[int]:
    return {id(p) for index in unit.groups for _, p in groups[index].parameters}


def group_bytes(group: Group) -> int:
    return sum(parameter.nbytes for _, parameter in group.parameters)


@given(models())
def test_every_parameter_is_in_exactly_one_group_under_its_name(model):
    groups, _ = partition(model)
    found = [(name, id(parameter)) for group in groups for name, parameter in group.parameters]
    assert sorted(found) == sorted((name, id(parameter)) for name, parameter in model.named_parameters())
    assert [group.index for group in groups] == list(range(len(groups)))
    assert all(group.parameters for group in groups)


@given(models())
def test_every_module_s_own_parameters_are_leased_by_a_unit_at_or_above_it(model):
    groups, units = partition(model)
    for module in model.modules():
        own = ids(module.parameters(recurse=False))
        around = [unit for unit in units if any(module is inside for inside in unit.module.modules())]
        assert any(own <= held(unit, groups) for unit in around), "or its forward would find them cold"


@given(models())
def test_a_unit_s_name_is_its_module_s_and_the_model_is_always_a_unit(model):
    _, units = partition(model)
    assert units[0].module is model and units[0].name == ""
    assert all(model.get_submodule(unit.name) is unit.module for unit in units)


@given(models())
def test_a_child_of_a_list_of_like_children_is_a_unit_with_all_below_it(model):
    groups, units = partition(model)
    for child in list_children(model):
        subtree = ids(child.parameters())
        assert not subtree or any(unit.module is child and subtree <= held(unit, groups) for unit in units)


@given(trees())
def test_a_group_belongs_to_one_child_of_a_list_or_to_none(model):
    groups, _ = partition(model)
    owner = {id(p): number for number, child in enumerate(list_children(model)) for p in child.parameters()}
    for group in groups:
        assert len({owner.get(id(p)) for _, p in group.parameters}) == 1


@given(models())
def test_a_tied_parameter_belongs_to_the_first_unit_that_needs_it_and_the_others_lease_that_group(model):
    groups, units = partition(model)
    position = {id(p): group.index for group in groups for _, p in group.parameters}
    first_user: dict[int, int] = {}
    for number, unit in enumerate(units):
        for parameter in unit.module.parameters(recurse=False):
            first_user.setdefault(id(parameter), number)
            assert position[id(parameter)] in unit.groups
    for parameter, number in first_user.items():
        assert position[parameter] in units[number].groups


@given(st.lists(st.integers(1, 900 * KIB), min_size=1, max_size=12))
def test_small_neighbours_share_a_group_as_long_as_it_stays_small(parts):
    groups, _ = partition(Branch([Leaf(nbytes) for nbytes in parts]))
    assert [p.nbytes for group in groups for _, p in group.parameters] == parts
    for group, following in itertools.pairwise(groups):
        assert group_bytes(group) <= MERGE_BELOW_BYTES
        assert group_bytes(group) + following.parameters[0][1].nbytes > MERGE_BELOW_BYTES, "there was room for one more"


def test_a_large_module_outside_of_lists_has_a_group_of_its_own():
    groups, _ = partition(Branch([Leaf(10), Leaf(3 * MERGE_BELOW_BYTES), Leaf(10), Leaf(10)]))
    assert [[p.nbytes for _, p in group.parameters] for group in groups] == [[10], [3 * MERGE_BELOW_BYTES], [10, 10]]


def test_nothing_joins_the_group_of_a_list_s_child():
    layers = nn.ModuleList([Branch([Leaf(5)], 1), Branch([Leaf(6)], 2)])
    groups, units = partition(Branch([Leaf(10), layers, Leaf(20), Leaf(30)]))
    assert [group.name for group in groups] == ["c0", "c1.0", "c1.1", "c2"]
    assert [[p.nbytes for _, p in group.parameters] for group in groups] == [[10], [1, 5], [2, 6], [20, 30]]
    assert [unit.name for unit in units] == ["", "c0", "c1.0", "c1.1", "c2", "c3"]


def test_a_list_of_different_children_is_an_ordinary_module():
    groups, units = partition(nn.Sequential(Leaf(1), OtherLeaf(2)))
    assert len(groups) == 1
    assert [unit.name for unit in units] == ["", "0", "1"]


def test_a_list_inside_a_list_s_child_belongs_to_that_child():
    blocks = [nn.Sequential(Leaf(1), Leaf(2)) for _ in range(3)]
    groups, units = partition(nn.ModuleList(blocks))
    assert [unit.name for unit in units] == ["", "0", "1", "2"]
    assert [len(group.parameters) for group in groups] == [2, 2, 2]


def test_tied_embedding_and_head_are_one_group_leased_by_both():
    model = nn.Module()
    model.embed = nn.Embedding(700, 500)
    model.layers = nn.ModuleList(nn.Linear(500, 500) for _ in range(2))
    model.head = nn.Linear(500, 700, bias=False)
    model.head.weight = model.embed.weight
    groups, units = partition(model)
    assert [name for name, _ in groups[0].parameters] == ["embed.weight"]
    leases = {unit.name: unit.groups for unit in units}
    assert leases == {"": (), "embed": (0,), "layers.0": (1,), "layers.1": (2,), "head": (0,)}


def test_torch_s_attention_has_all_that_it_looks_at():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False)
    model = Branch([nn.MultiheadAttention(8, 2), encoder])
    groups, units = partition(model)
    leases = {unit.name: held(unit, groups) for unit in units}
    assert ids(model.c0.parameters()) <= leases["c0"]
    assert ids(encoder.layers[0].parameters()) <= leases["c1"]
    assert ids(encoder.layers[0].parameters()) <= leases["c1.layers.0"]


def test_a_model_without_parameters_is_an_empty_unit():
    groups, units = partition(nn.Sequential(nn.ReLU(), nn.ReLU()))
    assert groups == []
    assert [(unit.name, unit.groups) for unit in units] == [("", ())]


@given(models(), st.randoms(use_true_random=False))
def test_the_largest_working_set_is_a_unit_with_all_the_units_around_it(model, random):
    groups, units = partition(model)
    pages = [random.randint(1, 9) for _ in groups]
    worst = 0
    for unit in units:
        needed = set(unit.groups)
        for around in units:
            inside = unit.name == around.name or around.name == "" or unit.name.startswith(f"{around.name}.")
            needed |= set(around.groups) if inside else set()
        worst = max(worst, sum(pages[index] for index in needed))
    found, where = largest_working_set(units, pages)
    assert found == worst
    assert not groups or any(unit.name == where for unit in units)


def test_lists_in_a_list_are_no_units_but_what_is_in_them() -> None:
    """Nobody calls a list: what it has would be brought when it is touched, and kept to the end."""
    stages = [nn.ModuleList([Leaf(KIB), Leaf(KIB)]), nn.ModuleList([Leaf(KIB), Leaf(KIB)])]
    groups, units = partition(Branch([nn.ModuleList(stages)]))
    assert [unit.name for unit in units] == ["", "c0.0.0", "c0.0.1", "c0.1.0", "c0.1.1"]
    assert [group.name for group in groups] == ["c0.0.0", "c0.0.1", "c0.1.0", "c0.1.1"]
