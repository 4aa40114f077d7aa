"""Pure KDA models of Flash Linear Attention (model_type ``kda``): no layer's memory grows.

Every layer is KDA with a dense SwiGLU MLP. Against Kimi Linear's KDA layer the output gate's map
has a bias; values may have more heads (``num_v_heads``) and another width (``expand_v``) than keys,
the write strength may go to 2 (``allow_neg_eigval``), and the decay may be bounded
(``lower_bound``). The parameters bear the names of Kimi Linear in mlx-lm, not FLA's.
"""

from .fla_kda_config import FlaKdaConfig
from .hybrid import HybridModel

ModelArgs = FlaKdaConfig


class Model(HybridModel):
    """A pure KDA model with its output head."""


__all__ = ["Model", "ModelArgs"]
