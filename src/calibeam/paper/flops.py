"""Appendix "Model FLOPs estimation": the cost of decoding, after Kaplan et al.'s table 1."""


def encoder_flops(parameters: float, layers: int, source_length: float, attention_size: int) -> float:
    """C_enc = 2 N_enc + 2 n_layer n_ctx d_attn, per source token"""
    return 2 * parameters + 2 * layers * source_length * attention_size


def decoder_flops(parameters: float, layers: int, target_length: float, attention_size: int) -> float:
    """C_dec = 2 N_dec + n_layer n_ctx d_attn, per output token: the causal mask halves the context"""
    return 2 * parameters + layers * target_length * attention_size


def total_flops(
    per_source_token: float, per_output_token: float, source_length: float, target_length: float, candidates: float
) -> float:
    """total_C = C_enc n_enc-ctx + C_dec n_dec-ctx m"""
    return per_source_token * source_length + per_output_token * target_length * candidates
