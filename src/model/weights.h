// Every weight the graph asked for: what it is packed from, how large it gets, and its memory once loaded.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/team.h"
#include "graph/graph.h"
#include "kernels/packed.h"
#include "model/checkpoint.h"

namespace weft {

// One packed matrix, or `copies` of equal shape behind each other (heads, experts).
struct Matrix {
  std::string label;
  PackedWeight w;  // of copy 0; pointers set by load
  int copies = 1;
  Slot codes, scales;
  // Packs panel `panel` of copy `copy` into its codes and scales.
  std::function<void(int copy, int panel, std::byte* codes, std::byte* scales)> pack;
  std::vector<const TensorInfo*> sources;

  size_t bytes() const { return (w.code_bytes() + w.scale_bytes()) * copies; }
};

// A small f32 array: norms, biases, convolutions.
struct Vector {
  std::string label;
  size_t count = 0;
  Slot slot;
  std::function<void(float*)> fill;
  std::vector<const TensorInfo*> sources;
};

// The embedding table, kept row-major in its stored dtype.
struct Table {
  std::string label;
  size_t bytes = 0;
  Slot slot;
  std::function<void(size_t first_row, size_t rows, std::byte* out)> fill;
  size_t rows = 0;
  std::vector<const TensorInfo*> sources;
};

struct LoadProgress {
  size_t done = 0, total = 0;  // bytes packed
};

class Weights {
 public:
  std::vector<Matrix> matrices;
  std::vector<Vector> vectors;
  std::vector<Table> tables;

  size_t bytes() const;
  // Packs everything and binds the slots; releases each source's pages as it goes, so that file and packed form are
  // never resident together. error: a tensor with NaN scales, a file that changed under us.
  void load(const Checkpoint& checkpoint, Graph& graph, Team& team,
            const std::function<void(const LoadProgress&)>& progress);

 private:
  Buffer memory_;
};

}  // namespace weft
