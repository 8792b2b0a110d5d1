from __future__ import annotations

from calibeam.paper.flops import decoder_flops, encoder_flops, total_flops


def test_encoder_flops_by_hand() -> None:
    """2 * 1000 + 2 * 3 layers * 10 tokens * 8 = 2480 per source token"""
    assert encoder_flops(1000, 3, 10, 8) == 2480


def test_decoder_flops_by_hand() -> None:
    """2 * 1000 + 3 layers * 10 tokens * 8 = 2240 per output token: the causal mask halves the attention"""
    assert decoder_flops(1000, 3, 10, 8) == 2240


def test_total_flops_by_hand() -> None:
    """2480 * 10 source tokens + 2240 * 5 output tokens * 4 candidates = 24,800 + 44,800: the source is read once"""
    assert total_flops(2480, 2240, 10, 5, 4) == 69_600
