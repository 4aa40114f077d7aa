"""How much a model's predictions move for the relative error of one of its weights.

Quantising one weight moves the predictions by a divergence (KL, nats a token) that is about
proportional to the weight's relative error ``|W - Q(W)|^2 / |W|^2``, and the divergences of several
weights about add up. The proportion differs by a factor of a hundred. It was measured on the
trained checkpoint in `examples`, weight by weight at 3 bits, and is rounded here by the weight's
role (docs/quality.md has it by family at 3 and 4 bits, and what it brings on two models):

- The embedding's error is in all that the layers read, the head's in all that they answer.
- The first layer writes while the stream still holds the embedding alone: three times the others.
- What a block writes counts more than what it compares with (values and outputs more than queries
  and keys), and the experts that a router weighs more than the shared one.
- The gate path counts little: its maps are squashed by a sigmoid or an exponential.

Only the proportions between weights matter. They know nothing of a model's data, so that they can
be had while a checkpoint streams by; another model's will differ.
"""

import re

# The first that matches counts.
ROLES = {
    r"^model\.embed_tokens$": 4.0,
    r"^lm_head$": 2.0,
    r"\.mlp\.shared_experts\.": 0.08,
    r"\.mlp\.switch_mlp\.": 0.4,
    r"\.mlp\.": 0.5,
    r"\.self_attn\.[vo]_proj$": 0.6,
    r"\.self_attn\.[qk]_proj$": 0.2,
    r"\.self_attn\.(b|f_a|f_b|g_a|g_b)_proj$": 0.08,
    r"\.self_attn\.": 0.2,  # latents of MLA
}
FIRST_LAYER, FIRST_FACTOR = "model.layers.0.", 3.0


def sensitivity(path: str, tied: bool = False) -> float:
    """Divergence for a relative error of 1 in the weight at a path, in MLX's names.

    A `tied` embedding is the head too.
    """
    weight = next((value for role, value in ROLES.items() if re.search(role, path)), 0.2)
    if tied and path == "model.embed_tokens":
        weight += ROLES["^lm_head$"]
    return weight * (FIRST_FACTOR if path.startswith(FIRST_LAYER) else 1.0)
