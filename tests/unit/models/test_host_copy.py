"""Promises of a host copy: contents and shared memory are restored to the bit; meanwhile the device is free."""

import torch

from rftdask.models.host_copy import HostCopy

CPU = torch.device("cpu")


def test_tensors_and_their_views_are_restored() -> None:
    head = torch.nn.Linear(4, 3, bias=False)
    tied = torch.nn.Parameter(head.weight.detach())  # another object, the same memory
    view = head.weight.detach()[1:]
    counter = torch.tensor([7, 8])
    before = [tensor.detach().clone() for tensor in (head.weight, tied, view, counter)]
    copy = HostCopy([head.weight, tied, counter], CPU)
    assert copy.num_bytes == 4 * 12 + 8 * 2
    assert torch.isnan(head.weight).all()
    assert torch.isnan(view).all()
    copy.back()
    for tensor, was in zip((head.weight, tied, view, counter), before, strict=True):
        assert torch.equal(tensor.detach(), was)
    assert tied.data_ptr() == head.weight.data_ptr()


def test_a_step_after_a_turn_is_the_step_without_one() -> None:
    def train(away: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.full((2, 8), float(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if away:
                state = [value for each in optimizer.state.values() for value in each.values()]
                HostCopy([*model.parameters(), *state], CPU).back()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))
