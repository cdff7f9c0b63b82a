#include "model/weights.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <exception>
#include <mutex>

namespace weft {
namespace {

// Counts every change of what packing writes: of packed.h, of the order of place(), of what a vector holds.
constexpr int kPackVersion = 1;

constexpr size_t kLoadStep = size_t{64} << 20;

size_t aligned(size_t bytes) {
  return (bytes + 63) & ~size_t{63};
}

// Runs f(i) for i < n on the team; the first exception is rethrown here, since tasks must not throw.
template <class F>
void for_all(Team& team, int n, const F& f) {
  std::exception_ptr error;
  std::mutex mutex;
  team.run(n, [&](int i, int) {
    try {
      f(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace

size_t Weights::bytes() const {
  size_t sum = 0;
  for (const Matrix& m : matrices)
    sum += aligned(m.w.code_bytes() * m.copies) + aligned(m.w.scale_bytes() * m.copies);
  for (const Vector& v : vectors) sum += aligned(v.count * sizeof(float));
  for (const Table& t : tables) sum += aligned(t.bytes);
  return sum;
}

// Matrices, vectors, tables, each at a multiple of 64 bytes, in the order of the walk that asked for them.
void Weights::place(const std::byte* next, Graph& graph) {
  const auto take = [&](size_t bytes) {
    const std::byte* p = next;
    next += aligned(bytes);
    return p;
  };
  for (Matrix& m : matrices) {
    m.w.codes = take(m.w.code_bytes() * m.copies);
    m.w.scales = m.w.scale_bytes() ? take(m.w.scale_bytes() * m.copies) : nullptr;
    graph.bind(m.codes, m.w.codes);
    if (m.w.scales) graph.bind(m.scales, m.w.scales);
  }
  for (Vector& v : vectors) graph.bind(v.slot, v.data = take(v.count * sizeof(float)));
  for (Table& t : tables) graph.bind(t.slot, t.data = take(t.bytes));
}

uint64_t Weights::key(const Checkpoint& checkpoint) const {
  std::string text = fmt::format("{} {:016x}\n", kPackVersion, checkpoint.identity());
  for (const Matrix& m : matrices)
    text += fmt::format("{} {} {} {} {}\n", m.label, m.w.n, m.w.k, static_cast<int>(m.w.format), m.copies);
  for (const Vector& v : vectors) text += fmt::format("{} {}\n", v.label, v.count);
  for (const Table& t : tables) text += fmt::format("{} {}\n", t.label, t.bytes);
  return XXH3_64bits(text.data(), text.size());
}

void Weights::load(const Checkpoint& checkpoint, Graph& graph, Team& team, const PackCacheOptions& cache,
                   const std::function<void(const LoadProgress&)>& progress) {
  const size_t total = bytes();
  cache_ = std::make_unique<PackCache>(cache, checkpoint.name(), key(checkpoint), total);
  if (const std::span<const std::byte> ready = cache_->open(team); !ready.empty()) {
    place(ready.data(), graph);
    if (progress) progress({total, total});
    return;
  }
  memory_ = Buffer(total + 64, "weights");
  place(memory_.as<std::byte>(), graph);
  pack(checkpoint, team, progress);
  cache_->store({memory_.as<std::byte>(), total});
}

void Weights::pack(const Checkpoint& checkpoint, Team& team,
                   const std::function<void(const LoadProgress&)>& progress) {
  checkpoint.check_unchanged();
  LoadProgress state{0, bytes()};
  const auto finished = [&](const std::vector<const TensorInfo*>& sources, size_t bytes) {
    for (const TensorInfo* tensor : sources) checkpoint.release(*tensor);
    state.done += bytes;
    if (progress) progress(state);
  };
  // `n` pieces of `bytes` each. Pages of the file are given back every kLoadStep, not once per tensor: an
  // output head of 2.3 GB would be resident twice.
  const auto pieces = [&](const std::vector<const TensorInfo*>& sources, int n, size_t bytes,
                          const auto& pack) {
    const int step = static_cast<int>(std::max<size_t>(1, kLoadStep / std::max<size_t>(1, bytes)));
    for (int first = 0; first < n; first += step) {
      const int count = std::min(step, n - first);
      for_all(team, count, [&](int i) { pack(first + i); });
      finished(sources, bytes * count);
    }
  };
  // place() gave addresses inside memory_.
  const auto writable = [](const std::byte* p) { return const_cast<std::byte*>(p); };
  for (Matrix& m : matrices) {
    std::byte *codes = writable(m.w.codes), *scales = writable(m.w.scales);
    const int panels = m.w.panels();
    pieces(m.sources, panels * m.copies, m.w.panel_bytes() + m.w.panel_scale_bytes(), [&](int i) {
      const size_t at = static_cast<size_t>(i);
      m.pack(i / panels, i % panels, codes + at * m.w.panel_bytes(),
             scales ? scales + at * m.w.panel_scale_bytes() : nullptr);
    });
  }
  for (Vector& v : vectors) {
    v.fill(reinterpret_cast<float*>(writable(v.data)));
    finished(v.sources, v.count * sizeof(float));
  }
  for (Table& t : tables) {
    std::byte* p = writable(t.data);
    const size_t row_bytes = t.bytes / t.rows;
    constexpr size_t kRows = 256;
    pieces(t.sources, static_cast<int>((t.rows + kRows - 1) / kRows), kRows * row_bytes, [&](int i) {
      const size_t first = static_cast<size_t>(i) * kRows;
      t.fill(first, std::min(kRows, t.rows - first), p + first * row_bytes);
    });
  }
  checkpoint.check_unchanged();
}

}  // namespace weft
