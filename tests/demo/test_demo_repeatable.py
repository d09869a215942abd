"""``repeatable`` gives the same random numbers each time and restores all settings."""

import torch

from detent.demo.network import repeatable


def test_the_numbers_are_those_of_the_seed():
    with repeatable(5):
        drawn = torch.rand(4)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(5)))


def test_generators_of_other_devices_do_not_change(monkeypatch):
    """Their states are not saved, so they could not be restored."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.xpu, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    with repeatable(5):
        torch.rand(4)
    assert seeded == []
    assert torch.equal(before, torch.get_rng_state())
