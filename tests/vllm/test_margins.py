# SPDX-License-Identifier: Apache-2.0
"""What the harness says about a nucleus's edge, against logits that are moved at random."""

import torch
from engine import _Margins

VOCAB, TOP_P, STEP = 12, 0.9, 0.1786


def kept(logits: torch.Tensor) -> torch.Tensor:
    mass, order = logits.softmax(-1).sort(descending=True)
    before = mass.cumsum(-1) - mass
    out = torch.zeros(VOCAB, dtype=torch.bool)
    out[order[before < TOP_P]] = True
    return out


def test_nucleus_edge_covers_every_move_of_a_step():
    seed = torch.seed()
    print(f"seed {seed}")
    for _ in range(100):
        logits = 3 * torch.randn(VOCAB, dtype=torch.float64)
        surely, maybe = (
            rows[0]
            for rows in _Margins._nucleus_edge(
                logits[None].float(), torch.tensor([TOP_P]), torch.tensor([STEP])
            )
        )
        assert not (surely & kept(logits)).any() and not (~maybe & ~kept(logits)).any()
        for _ in range(200):
            # two logits move by a step against each other at most
            move = torch.randint(0, 2, (VOCAB,)) - 0.5
            moved = kept(logits + STEP * move)
            assert not (surely & moved).any(), "called dropped, and kept"
            assert not (~maybe & ~moved).any(), "called kept, and dropped"
        assert (surely <= maybe).all()


def test_a_mass_far_from_p_is_no_edge():
    """The difference has to lie at the edge: neither verdict may cover everything."""
    logits = torch.tensor([[4.0, 3.5, 0.0, -1.0]])
    surely, maybe = _Margins._nucleus_edge(logits, torch.tensor([0.9]), torch.tensor([STEP]))
    assert surely.tolist() == maybe.tolist() == [[False, False, True, True]]
