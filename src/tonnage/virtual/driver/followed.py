"""ATen overloads whose values are tracked on the virtual card, grouped by how they are handled."""


def _both(names: str, overloads: str) -> list[str]:
    """Return each operator with each overload, and their in-place variants."""
    return [
        f"{name}{suffix}.{overload}" for name in names.split() for overload in overloads.split() for suffix in ("", "_")
    ]


# Computed on the host if all operands are known.
EVALUATED = [
    *_both("add sub mul div remainder bitwise_and bitwise_or bitwise_xor fmod", "Tensor Scalar"),
    *"""
    floor_divide floor_divide_ floor_divide.Scalar pow.Tensor_Scalar pow.Tensor_Tensor rsub.Scalar
    logical_and logical_or logical_xor logical_not logical_and_ logical_or_ logical_not_ bitwise_not bitwise_not_
    neg abs sign floor ceil round sqrt rsqrt exp log reciprocal neg_ abs_
    clamp clamp_ clamp.Tensor clamp_min clamp_max maximum minimum
    where.self where.ScalarSelf where.ScalarOther where.Scalar
    masked_fill.Scalar masked_fill_.Scalar masked_fill.Tensor masked_fill_.Tensor masked_select
    index.Tensor _unsafe_index.Tensor index_select gather take embedding index_put_ _index_put_impl_ index_copy_
    index_fill_.int_Scalar scatter.value scatter_.value scatter.src scatter_.src scatter_add scatter_add_
    sum sum.dim_IntList prod prod.dim_int mean mean.dim any any.dim all all.dim max min amax amin max.dim min.dim
    cumsum cumsum_ cumprod count_nonzero.dim_IntList bincount
    cat clone lift_fresh_copy constant_pad_nd flip roll tril triu tril_ triu_ repeat_interleave.Tensor
    searchsorted.Tensor bucketize.Tensor isin.Tensor_Tensor isin.Tensor_Scalar _amp_update_scale_
    """.split(),
]
# Of these, a tensor of any size gives a small result.
REDUCED = frozenset("sum prod mean any all max min amax amin count_nonzero bincount".split())
FLAGS = [
    *"isnan isposinf isneginf isinf".split(),
    *(f"{name}.{overload}" for name in ("eq", "ne", "gt", "ge", "lt", "le") for overload in ("Scalar", "Tensor")),
]
SAMPLERS = "uniform_ normal_ random_ random_.from random_.to bernoulli_.float bernoulli_.Tensor".split()
FILLS = "fill_.Scalar fill_.Tensor zero_ arange.start_out eye.out eye.m_out".split()
# Operators that return indices chosen by value; the indices are the last result.
CHOSEN = "topk argmax argmin multinomial sort sort.stable".split()
