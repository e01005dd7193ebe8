"""Models in stages: how they are cut, what stands in for what is elsewhere, and the messages between stages."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.errors import JobError, ModelError, Unreadable
from unisono.train.model.elsewhere import Elsewhere, as_received, decode, encode, holds_elsewhere, resolved
from unisono.train.model.stages import StagePlaces, Stages
from unisono.train.model.staging import Left, Received, Staging
from unisono.train.step.stage_messages import HEADER, Channel, MessagePart, StageMessage

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")

NamedPair = namedtuple("NamedPair", "left right")


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)) for _ in range(4)))


def staged(rank: int, devices: int = 2, schedule: str = "1f1b") -> tuple[nn.Sequential, Staging]:
    model = chain()
    stages = Stages.of(model, ["1", "2", "3"])
    placement = StagePlaces.of(schedule, stages.count, devices, rank)
    return model, Staging(model, stages, placement, lambda value, source: value, CPU)


# -- who holds what


@pytest.mark.parametrize(
    ("schedule", "stages", "devices", "firsts", "own"),
    [
        ("1f1b", 5, 2, (0, 3), [range(0, 2, 2), range(1, 2, 2)]),
        ("gpipe", 3, 3, (0, 1, 2), [range(0, 3, 3), range(1, 3, 3), range(2, 3, 3)]),
        ("looped-bfs", 5, 2, (0, 2, 3, 4), [range(0, 4, 2), range(1, 4, 2)]),
    ],
)
def test_devices_hold_neighbouring_stages_or_every_so_many_blocks_of_them(
    schedule: str, stages: int, devices: int, firsts: tuple[int, ...], own: list[range]
) -> None:
    placed = [StagePlaces.of(schedule, stages, devices, rank) for rank in range(devices)]
    assert placed[0].firsts == firsts
    assert [list(each.own) for each in placed] == [list(each) for each in own]
    assert placed[0].last == devices - 1


def test_more_devices_than_stages_are_refused_with_the_cure() -> None:
    with pytest.raises(JobError, match="5 devices, and the model has 4 stages: give it more cuts, at least 4"):
        StagePlaces.of("1f1b", 4, 5, 0)


def test_what_another_device_holds_has_a_name_and_a_shape_and_no_memory() -> None:
    model, staging = staged(rank=1)
    assert [name for name, one in model.named_parameters() if one.is_meta] == [
        "0.0.weight",
        "0.0.bias",
        "1.0.weight",
        "1.0.bias",
    ]
    assert {staging.owner(name) for name, _ in model.named_parameters() if name < "2"} == {0}
    assert torch.equal(model[3][0].weight, chain()[3][0].weight)  # type: ignore[index]


def test_a_model_on_the_meta_device_gets_the_values_of_one_device() -> None:
    whole = chain()
    torch.manual_seed(5)
    for module in whole.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    with torch.device("meta"):
        hollow = chain()
    torch.manual_seed(5)
    stages = Stages.of(hollow, ["1", "2", "3"])
    Staging(hollow, stages, StagePlaces.of("1f1b", 4, 2, 1), lambda value, source: value, CPU)
    assert torch.equal(hollow[3][0].weight, whole[3][0].weight)  # type: ignore[index]


# -- passes


def test_stage_after_stage_computes_what_the_whole_model_does_and_draws_as_it_does() -> None:
    inputs = torch.randn(5, 3)
    whole, (first, one), (second, other) = chain(), staged(rank=0), staged(rank=1)
    torch.manual_seed(1)
    expected = whole(inputs)
    torch.manual_seed(1)
    with pytest.raises(Left) as left, one.computing(0, None):
        first(inputs)
    drawn = torch.get_rng_state()
    received = Received(left.value.numbers, left.value.tensors, lambda: torch.set_rng_state(drawn))
    with other.computing(1, received):
        found = second(inputs)
    assert torch.equal(found, expected)
    assert str(left.value) == ""  # the text of an exception is asked for, and tensors take long to print


def test_a_model_in_stages_is_called_in_a_pass_alone() -> None:
    model, _ = staged(rank=0)
    with pytest.raises(ModelError, match="'2' is called outside of a loss function"):
        model(torch.zeros(1, 3))


def test_a_backward_hook_where_a_stage_begins_is_refused() -> None:
    model, staging = staged(rank=0)
    model[2].register_full_backward_hook(lambda module, before, after: None)
    with pytest.raises(ModelError, match="'2', where a stage begins, has a backward hook"), staging.computing(0, None):
        model(torch.zeros(1, 3))


# -- what is elsewhere


def test_what_is_made_of_something_elsewhere_is_elsewhere_until_it_is_received() -> None:
    x: Any = Elsewhere()
    made: list[Any] = [
        x + 1,
        2 * x,
        torch.relu(x),
        F.linear(x, torch.ones(2, 2)),
        x.view(3),
        x[0],
        x.T,
        torch.ones(2) @ x,
    ]
    assert all(isinstance(each, Elsewhere) for each in made)
    assert holds_elsewhere({"a": [x]})
    x.value = torch.ones(2)
    assert torch.equal(x + 1, torch.full((2,), 2.0))
    assert torch.equal(torch.relu(x), torch.ones(2))
    assert x.shape == (2,)
    assert not holds_elsewhere(resolved([x]))


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.shape,
        lambda x: x.size(0),
        bool,
        len,
        float,
        list,
        lambda x: torch.zeros(2).copy_(x),
        lambda x: torch.zeros(2).__setitem__(0, x),
        lambda x: torch.zeros(2).__iadd__(x),
        lambda x: torch.add(x, 1, out=torch.zeros(2)),
    ],
)
def test_code_that_looks_at_something_elsewhere_is_refused_with_the_cure(look: Any) -> None:
    with pytest.raises(
        ModelError, match="move this code into a module, which then runs on the device of its stage alone"
    ):
        look(Elsewhere())


def test_a_received_tensor_may_be_changed_in_place_and_has_its_gradient() -> None:
    leaf = torch.tensor([-1.0, 2.0], requires_grad=True)
    F.relu(as_received(leaf), inplace=True).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, 1.0]


def test_what_goes_on_has_the_form_that_it_has_on_the_device_before_wherever_it_is_elsewhere_here() -> None:
    class Own:
        """What every device has."""

    own, tensor, pair = Own(), torch.ones(2), NamedPair(torch.zeros(1), 3)
    sent: Any = ((tensor, [2.5, None, True], {"a key": (tensor, 7)}, own, pair), {})
    numbers, tensors = encode(sent, lambda: "skipped")
    assert len(tensors) == 2  # each once
    second: Any = Elsewhere()
    third: Any = Elsewhere()
    found, _ = decode(numbers, tensors, ((Elsewhere(), second, third, own, NamedPair(Elsewhere(), 3)), {}))
    assert found[0] is tensor
    assert found[1:4] == (sent[0][1], {"a key": (tensor, 7)}, own)
    assert isinstance(found[4], NamedPair)
    assert second[0] + 1 == 3.5  # it may be used again
    assert resolved([third])[0]["a key"][1] == 7
    assert torch.equal(third["a key"][0] * 2, 2 * tensor)


@pytest.mark.parametrize(
    ("sent", "own"), [((1, 2), (Elsewhere(),)), ([1], (1,)), ({"a": 1}, [1, 2]), (slice(3), Elsewhere())]
)
def test_another_form_than_on_the_device_before_is_refused(sent: Any, own: Any) -> None:
    numbers, tensors = encode((sent, {}), lambda: "skipped")
    with pytest.raises(ModelError, match="is of another form|gets a value that is no tensor"):
        decode(numbers, tensors, (own, {}))


def test_a_value_elsewhere_is_unpacked_into_names() -> None:
    x: Any = Elsewhere()
    first, (second, third) = x
    assert holds_elsewhere([first])
    assert holds_elsewhere([second])
    assert third is not second


# -- messages


TENSORS = [
    torch.randn(3, 4),
    torch.randn(4, 3).T,
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.randn(6, 8)[:, :5],
    torch.randn(1, 4).expand(3, 4),
    torch.tensor(True),
    torch.empty(0, 3),
    torch.randn(3).bfloat16(),
    torch.arange(4),
]


def sent(message: StageMessage, sender: Channel, receiver: Channel) -> tuple[StageMessage, int]:
    """What arrives, and in how many buffers."""
    buffers = sender.packed(message)
    into = receiver.buffer()
    assert into.numel() == buffers[0].numel()
    rests = buffers[1:]
    found = receiver.opened(buffers[0], lambda rest: rest.copy_(rests.pop()))
    assert not rests
    return found, len(buffers)


def test_messages_keep_dtypes_shapes_and_layouts_and_travel_as_one_when_their_size_is_known() -> None:
    message = StageMessage([7, -1], [MessagePart(each, number % 2 == 0) for number, each in enumerate(TENSORS)])
    sender, receiver = Channel(CPU, "there"), Channel(CPU, "here")
    for expected in (2, 1, 1):
        sender.begin()
        receiver.begin()
        found, buffers = sent(message, sender, receiver)
        assert buffers == expected
        assert found.numbers == [7, -1]
        for part, tensor in zip(found.parts, TENSORS, strict=True):
            assert torch.equal(part.tensor, tensor)
            assert (part.tensor.dtype, part.tensor.stride()) == (tensor.dtype, tensor.stride())
        assert [part.is_marked for part in found.parts] == [part.is_marked for part in message.parts]


def test_a_message_that_has_outgrown_the_one_before_follows_what_announces_it() -> None:
    sender, receiver = Channel(CPU, "there"), Channel(CPU, "here")
    for size, expected in ((0, 1), (10, 2), (5, 1), (1000, 2)):
        sender.begin()
        receiver.begin()
        found, buffers = sent(StageMessage([], [MessagePart(torch.ones(size))]), sender, receiver)
        assert (int(found.parts[0].tensor.sum()), buffers) == (size, expected)


def test_too_many_tensors_for_a_message_are_refused_with_the_cure() -> None:
    with pytest.raises(ModelError, match="cut where fewer go on"):
        Channel(CPU, "there").packed(StageMessage([], [MessagePart(torch.ones(2, 2))] * 60))


@pytest.mark.parametrize(
    "numbers",
    [[-1], [HEADER + 1], [0, 1, -5], [0, 1, 64, 99, 0, 0], [0, 1, 64, 0, 0, 9], [0, 1, 64, 0, 0, 1, 10**9, 1]],
)
def test_bytes_that_are_no_message_are_refused(numbers: list[int]) -> None:
    channel = Channel(CPU, "stage 1")
    buffer = channel.buffer()
    buffer.zero_()
    buffer[: 8 * len(numbers)].view(torch.int64).copy_(torch.tensor(numbers))
    with pytest.raises(Unreadable, match="stage 1 has sent"):
        channel.opened(buffer, Tensor.zero_)
