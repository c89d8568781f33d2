"""Parameters that are replaced, converted or trained beside the wrapper; on one rank."""

import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks import HookState, comm_hook
from commhooks.classic._hooked_model import find_model
from commhooks.hook._parameters import find_owner
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import MixedPrecision
from ddp_core.reducer._known import KnownParameters
from tests.unit.one_rank import KINDS, layers, run_steps

pytestmark = pytest.mark.usefixtures("one_rank", "warnings_are_errors")


HOOKED = [(DistributedDataParallel, "int8"), (CoreDDP, None), (CoreDDP, "int8")]


class Tracked:
    """Something that the garbage collector knows, as it does every module."""


def test_the_search_for_a_model_keeps_nothing_alive():
    model, hook = DistributedDataParallel(layers()), HookState("int8")
    model.register_comm_hook(hook, comm_hook)
    run_steps(model)
    bystander = Tracked()
    alive = weakref.ref(bystander)
    gc.disable()
    try:
        assert find_owner(hook) is model
        assert find_model(list(model.parameters())) is model
        del bystander
        assert alive() is None
    finally:
        gc.enable()


def trained(kind, scheme, model=None, **options):
    ddp = kind(layers() if model is None else model, **options)
    hook = None if scheme is None else commhooks.register(ddp, scheme)
    run_steps(ddp, 2)
    return ddp, hook


def assign(ddp):
    ddp.load_state_dict({k: v.clone() for k, v in ddp.state_dict().items()}, assign=True)


def overwrite(ddp):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    ddp.bfloat16().float()
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def new_layer(ddp):
    ddp.module.add_module("new", nn.Linear(8, 8))


def one_weight(ddp):
    ddp.module[1].weight = nn.Parameter(ddp.module[1].weight.detach().clone())


def tied(ddp):
    ddp.module[1].weight = ddp.module[0].weight


def parametrized(ddp):
    nn.utils.parametrize.register_parametrization(ddp.module[1], "weight", nn.Identity())


CHANGES = {
    parametrized: r"1.weight was of another dtype.*Tensor\.set_",
    assign: "2.bias is another object than those that were wrapped",
    overwrite: "2.bias is another object than those that were wrapped",
    one_weight: "1.weight is another object than those that were wrapped",
    new_layer: "new.bias is another object than those that were wrapped",
    tied: "the model has no parameter 1.weight any more",
    lambda ddp: ddp.double(): "is of torch.float64 on cpu now, and was of torch.float32",
    lambda ddp: ddp.module[1].double(): "1.weight is of torch.float64",
    lambda ddp: ddp.double().float(): "was of another dtype, or on another device, for a while",
    lambda ddp: ddp.module[1].double().float(): r"1\.\w+ was of another dtype",
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.items())
@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_change_of_the_parameters_is_an_error_in_the_next_step(kind, scheme, change, reason):
    ddp, _ = trained(kind, scheme)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of set_overwrite_module_params_on_conversion
        change(ddp)
    # Who tries a converted model again meets the same error: it comes before the forward pass.
    for _ in range(2 if "was of" in reason else 1):
        with pytest.raises(RuntimeError, match=reason):
            ddp(torch.ones(2, 8, dtype=next(ddp.parameters()).dtype)).sum().backward()


@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_converted_model_is_found_behind_layers_that_are_frozen_now(kind, scheme):
    ddp, _ = trained(kind, scheme, layers(8), find_unused_parameters=True)
    ddp.module[:6].requires_grad_(False)
    ddp.double()
    for _ in range(3):  # whoever tries again meets the same error
        with pytest.raises(RuntimeError, match=r"6\.\w+ is of torch.float64"):
            ddp(torch.ones(2, 8, dtype=torch.float64))


@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_wrappers_that_share_parameters_are_looked_for_once(kind, scheme, monkeypatch):
    model = layers()
    both = [kind(model, find_unused_parameters=True) for _ in range(2)]
    for parameter in both if scheme else ():
        commhooks.register(parameter, scheme)
    looks, find = [], gc.get_objects
    monkeypatch.setattr("gc.get_objects", lambda: looks.append(1) or find())
    for _ in range(3):
        for wrapper in both:
            run_steps(wrapper)
    assert len(looks) <= 2


def test_a_frozen_layer_may_be_swapped():
    """Torch does not swap a tensor that has weak references."""
    model = layers()
    model[0].requires_grad_(False)
    ddp = CoreDDP(model)
    run_steps(ddp)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model[0].double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model[0].weight.dtype == torch.float64


def test_reducers_of_earlier_groups_have_no_hooks():
    ddp = CoreDDP(layers(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    before = ddp.reducer
    parameter = next(ddp.parameters())
    hooks = len(parameter._post_accumulate_grad_hooks)
    ddp.change_group(dist.new_group([0]))
    assert ddp.reducer is not before
    assert not before.accumulators._handles
    assert len(parameter._post_accumulate_grad_hooks) == hooks


@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_converted_layer_whose_memory_is_the_same_by_chance_is_found(kind, scheme, monkeypatch):
    monkeypatch.setattr(KnownParameters, "_present_pointers", lambda self: [])
    ddp, _ = trained(kind, scheme, layers(20), find_unused_parameters=True)
    ddp.module[13].double().float()
    with pytest.raises(RuntimeError, match=r"13\.\w+ was of another dtype"):
        run_steps(ddp, 40)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_loss_beside_the_wrapper_is_an_error(kind, scheme, before):
    ddp = kind(layers())
    if scheme:
        commhooks.register(ddp, scheme)
    if before:
        run_steps(ddp)
    ddp.zero_grad()
    why = "came after this step's" if before else "came without a forward pass of Distributed"
    with pytest.raises(RuntimeError, match=why):
        ddp.module(torch.ones(2, 8)).sum().backward()
    for _ in range(2):  # it goes on
        run_steps(ddp)


# A state may find its model itself, when the ranks meet.
BY_HAND = {
    "of the model": HookState,
    "alone": lambda scheme, ddp: HookState(scheme),
    "of a group": lambda scheme, ddp: HookState(scheme, process_group=dist.group.WORLD),
    "unpickled": lambda scheme, ddp: pickle.loads(pickle.dumps(HookState(scheme))),
}


@pytest.mark.parametrize("make", BY_HAND.values(), ids=BY_HAND)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_was_registered_by_hand_is_guarded_from_its_first_call(kind, make):
    ddp = kind(layers())
    ddp.register_comm_hook(make("int8", ddp), comm_hook)
    run_steps(ddp, 2)
    with pytest.raises(RuntimeError, match="came after this step's"):
        ddp.module(torch.ones(2, 8)).sum().backward()
    assign(ddp)
    with pytest.raises(RuntimeError, match="another object"):
        run_steps(ddp)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_layer_that_a_reentrant_checkpoint_runs_twice_is_an_error(kind, scheme):
    ddp = kind(Twice())
    if scheme:
        commhooks.register(ddp, scheme)
    with pytest.raises(RuntimeError, match="marked as ready twice"):
        run_steps(ddp, 2)


def test_parameters_that_were_replaced_before_register_are_not_called_frozen():
    ddp = DistributedDataParallel(layers())
    one_weight(ddp)
    commhooks.register(ddp, "int8")  # no warning
    with pytest.raises(RuntimeError, match=r"1\.weight is another object"):
        run_steps(ddp)


def swapped(ddp, x):
    """Averages of weights are put in place for a while."""
    kept = [parameter.data for parameter in ddp.parameters()]
    for parameter in ddp.parameters():
        parameter.data = parameter.data * 0.5
    with torch.no_grad():
        ddp(x)
    for parameter, value in zip(ddp.parameters(), kept, strict=True):
        parameter.data = value


def functional(ddp, x):
    others = {name: nn.Parameter(value.detach()) for name, value in ddp.named_parameters()}
    torch.func.functional_call(ddp, others, (x,)).sum().backward()
    torch.func.functional_call(
        ddp, {k: v.detach().requires_grad_() for k, v in others.items()}, (x,)
    ).sum().backward()


def accumulated(ddp, x):
    for _ in range(2):
        with ddp.no_sync():
            ddp(x).sum().backward()
            ddp.module(x).sum().backward()
    ddp(x).sum().backward()
    ddp.zero_grad()


def half_inside(ddp, x):
    """Torch's guide has the forward pass inside; the last backward pass averages all."""
    with ddp.no_sync():
        loss = ddp(x).sum()
    loss.backward()
    ddp(x).sum().backward()
    ddp.zero_grad()


def unused_layer(ddp, x):
    ddp.module.teacher = [layers()]
    ddp.module.add_module("teacher_of_later", layers(1))
    first = ddp.module.forward
    ddp.module.forward = lambda x: ddp.module[:3](x)
    ddp(x).sum().backward()
    ddp.module.forward = first
    del ddp.module.teacher_of_later, ddp.module.teacher


def wrapped_again(ddp, x):
    again = type(ddp)(ddp.module)
    run_steps(again)
    ddp.zero_grad()


FINE = [
    lambda ddp, x: ddp(x),  # and no backward pass
    lambda ddp, x: torch.autograd.grad(ddp.module(x).sum(), list(ddp.parameters())),
    lambda ddp, x: ddp.eval()(x).sum().backward(),
    lambda ddp, x: ddp.module.requires_grad_(False).requires_grad_(True),
    swapped,
    functional,
    accumulated,
    half_inside,
    unused_layer,
    wrapped_again,
]


@pytest.mark.parametrize("use", FINE)
@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_what_is_no_mistake_is_no_error(kind, scheme, use):
    ddp, hook = trained(kind, scheme)
    use(ddp, torch.ones(2, 8))
    ddp.train()
    run_steps(ddp, 3)
    assert hook is None or hook.step >= 5


def test_the_composable_form_is_guarded():
    for change, reason in ((assign, "2.bias is another"), (nn.Module.double, "torch.float64")):
        model = replicate(layers())
        commhooks.register(model, "int8")
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(RuntimeError, match=r"gradient of [12]\.\w+ came after"):
            model[2](model[1](torch.ones(2, 8))).sum().backward()
        change(model)
        with pytest.raises(RuntimeError, match=reason):
            model(torch.ones(2, 8, dtype=model[0].weight.dtype)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_evaluated_and_not_trained(kind):
    ddp, _ = trained(kind, "powersgd")
    average = AveragedModel(ddp, use_buffers=True)
    x = torch.ones(2, 8)
    with torch.no_grad():
        average(x)
    average.eval()(x)
    average.train()
    with pytest.raises(RuntimeError, match=r"unpickled or copied.*eval\(\)"):
        average(x)
    run_steps(ddp)


def changed_step(ddp, zero, change):
    change(ddp)
    zero.zero_grad()
    ddp(torch.ones(2, 8, dtype=ddp.module[0].weight.dtype)).sum().backward()
    zero.step()


def test_a_zero_optimizer_says_what_is_wrong_with_the_parameters():
    for change, reason in (
        (lambda ddp: ddp.module[1].requires_grad_(False), "Frozen since .* 1.weight, 1.bias"),
        (assign, "is another object"),
        (nn.Module.double, r"converted to another dtype or device \(\.double\)"),
        (lambda ddp: (ddp.zero_grad(), ddp.double()), "is of torch.float64 on cpu now"),
    ):
        ddp = CoreDDP(layers())
        zero = commhooks.ZeroOptimizer(ddp, torch.optim.SGD, lr=0.1)
        run_steps(ddp)
        zero.step()
        with pytest.raises(RuntimeError, match=reason):
            changed_step(ddp, zero, change)
