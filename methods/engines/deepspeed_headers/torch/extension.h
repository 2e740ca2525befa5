// What DeepSpeed's kernels use of torch/extension.h: tensors and their bindings. The rest of that header, mostly
// torch::nn, takes nearly half of a file's compilation.
#pragma once
#include <torch/types.h>

#include <torch/csrc/utils/pybind.h>
