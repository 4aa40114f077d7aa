"""Tensor parallelism: heads and widths are split over the processes of a group.

KDA and MLA split by head and communicate only in the output projection, which sums.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear

from ..errors import UserError
from ..layers import MLA, KimiDeltaAttention, MoE


def shard(model: nn.Module, group: mx.distributed.Group) -> None:
    """Keep this process's share of ``model``, in place.

    Raises:
        UserError: heads, a width or its quantisation groups cannot be split over the processes.
    """
    size = group.size()
    if size == 1:
        return
    args = model.args
    for what, count in (
        ("KDA heads", args.linear_num_heads),
        ("MLA heads", args.num_attention_heads),
        ("intermediate_size", args.intermediate_size),
        ("moe_intermediate_size", args.moe_intermediate_size),
    ):
        if count % size:
            raise UserError(f"{count} {what} cannot be split over {size} processes")
    for path, module in model.named_modules():
        if path.endswith(("o_proj", "down_proj")) and "scales" in module:
            groups = module.scales.shape[-1]
            if groups % size:
                raise UserError(f"{path}: {groups} quantisation groups cannot be split over {size}")
    for layer in model.layers:
        if layer.is_linear:
            _shard_kda(layer.self_attn, group)
        else:
            _shard_mla(layer.self_attn, group)
        if isinstance(layer.mlp, MoE):
            layer.mlp.sharding_group = group
            _shard_mlp(layer.mlp.switch_mlp, group)
            if layer.mlp.shared_experts is not None:
                _shard_mlp(layer.mlp.shared_experts, group)
        else:
            _split(layer.mlp, ("gate_proj", "up_proj"), "all-to-sharded", group)
            _split(layer.mlp, ("down_proj",), "sharded-to-all", group)


def _split(module: nn.Module, names: tuple[str, ...], how: str, group) -> None:
    for name in names:
        setattr(module, name, shard_linear(getattr(module, name), how, group=group))


def _shard_mlp(mlp: nn.Module, group) -> None:
    """In place: the MoE block adds up its experts and shared experts at once."""
    for name in ("gate_proj", "up_proj"):
        shard_inplace(getattr(mlp, name), "all-to-sharded", group=group)
    shard_inplace(mlp.down_proj, "sharded-to-all", group=group)


def _shard_kda(attn: KimiDeltaAttention, group) -> None:
    heads, v_heads = attn.num_heads // group.size(), attn.num_v_heads // group.size()
    mine = slice(group.rank() * v_heads, (group.rank() + 1) * v_heads)
    columns = ("q_proj", "k_proj", "v_proj", "f_b_proj", "g_b_proj", "b_proj")
    _split(attn, columns, "all-to-sharded", group)
    _split(attn, ("o_proj",), "sharded-to-all", group)
    for conv in (attn.q_conv.conv, attn.k_conv.conv, attn.v_conv.conv):
        count = conv.weight.shape[0] // group.size()
        conv.weight = conv.weight[group.rank() * count : (group.rank() + 1) * count]
        conv.groups = count
    attn.A_log = attn.A_log[:, :, mine]
    attn.dt_bias = attn.dt_bias[mine.start * attn.head_dim : mine.stop * attn.head_dim]
    attn.num_heads, attn.num_v_heads = heads, v_heads


def _shard_mla(attn: MLA, group) -> None:
    heads = attn.num_heads // group.size()
    mine = slice(group.rank() * heads, (group.rank() + 1) * heads)
    _split(attn, ("q_proj",), "all-to-sharded", group)
    _split(attn, ("o_proj",), "sharded-to-all", group)
    attn.embed_q.apply(lambda w: w[mine])
    attn.unembed_out.apply(lambda w: w[mine])
    attn.num_heads = heads
