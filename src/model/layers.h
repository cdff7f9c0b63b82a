// The decoder stack, put together from what ModelConfig says and the names a family gives its tensors.
#pragma once

#include <string>

namespace weft {

class Builder;
struct ModelConfig;

// Where families spell the same thing differently.
struct StackNames {
  const char* moe = "mlp";                // module of routed layers
  const char* expert_gate = "gate_proj";  // of experts.N
  const char* expert_up = "up_proj";
  const char* expert_down = "down_proj";
};

void build_stack(Builder& builder, const ModelConfig& config, const StackNames& names = {});

}  // namespace weft
