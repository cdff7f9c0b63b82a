// Every weight the graph asked for: what it is packed from, how large it gets, and its memory once loaded.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/team.h"
#include "graph/graph.h"
#include "kernels/packed.h"
#include "model/checkpoint.h"
#include "model/pack_cache.h"

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
  const std::byte* data = nullptr;  // set by load
};

// The embedding table, kept row-major in its stored dtype.
struct Table {
  std::string label;
  size_t bytes = 0;
  Slot slot;
  std::function<void(size_t first_row, size_t rows, std::byte* out)> fill;
  size_t rows = 0;
  std::vector<const TensorInfo*> sources;
  const std::byte* data = nullptr;  // set by load
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
  // Takes everything from the cache, or packs it and leaves it there; binds the slots. Packing releases each
  // source's pages as it goes, so that file and packed form are never resident together. error: a tensor with
  // NaN scales, a file that changed under us.
  void load(const Checkpoint& checkpoint, Graph& graph, Team& team, const PackCacheOptions& cache,
            const std::function<void(const LoadProgress&)>& progress);
  // Of the checkpoint and of everything the packed bytes depend on: two equal keys mean equal bytes.
  uint64_t key(const Checkpoint& checkpoint) const;
  bool cached() const { return !memory_.data() && bytes() > 0; }  // after load(): mapped, not packed

 private:
  void place(const std::byte* base, Graph& graph);
  void pack(const Checkpoint& checkpoint, Team& team,
            const std::function<void(const LoadProgress&)>& progress);

  Buffer memory_;
  std::unique_ptr<PackCache> cache_;  // holds the mapping, or writes memory_ to its file: ends before it
};

}  // namespace weft
