// How sub-layers are joined: a value with four verbs. begin takes the embedding, mix gives a sub-layer its normed
// input, sink says where the sub-layer's last product goes and add folds it in, end gives the head's input.
#pragma once

#include <memory>
#include <string>

#include "model/builder.h"

namespace weft {

struct Site {
  int layer;
  bool ffn;
  std::string scope;  // "layers.3."
  std::string norm;   // name of the layer norm
  int number() const { return 2 * layer + (ffn ? 1 : 0); }
};

class ResidualPath {
 public:
  virtual ~ResidualPath() = default;
  virtual void begin() = 0;
  virtual Normed mix(const Site& site, bool want_f32) = 0;
  virtual Sink sink(const Site& site) = 0;
  virtual void add(const Site& site, const Sink& sink) = 0;
  virtual Normed end() = 0;                      // rows are logit rows
  virtual Val current() const = 0;            // for traces: [tokens, width()]
  virtual int width() const = 0;
};

std::unique_ptr<ResidualPath> make_residual(Builder& builder);

}  // namespace weft
