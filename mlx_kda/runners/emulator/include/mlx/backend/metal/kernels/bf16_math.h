// In place of MLX's file, which wraps private built-ins of Apple's compiler: the stand-in's own
// functions take bfloat and give bfloat, as those wrappers do.
#pragma once
