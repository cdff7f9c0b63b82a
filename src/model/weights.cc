#include "model/weights.h"

#include <algorithm>
#include <exception>
#include <mutex>

namespace weft {
namespace {

constexpr size_t kLoadStep = size_t{64} << 20;

size_t aligned(size_t bytes) { return (bytes + 63) & ~size_t{63}; }

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
  for (const Matrix& m : matrices) sum += aligned(m.w.code_bytes() * m.copies) + aligned(m.w.scale_bytes() * m.copies);
  for (const Vector& v : vectors) sum += aligned(v.count * sizeof(float));
  for (const Table& t : tables) sum += aligned(t.bytes);
  return sum;
}

void Weights::load(const Checkpoint& checkpoint, Graph& graph, Team& team,
                   const std::function<void(const LoadProgress&)>& progress) {
  checkpoint.check_unchanged();
  LoadProgress state{0, bytes()};
  memory_ = Buffer(state.total + 64, "weights");
  std::byte* next = memory_.as<std::byte>();
  const auto take = [&](size_t bytes) {
    std::byte* p = next;
    next += aligned(bytes);
    return p;
  };
  const auto finished = [&](const std::vector<const TensorInfo*>& sources, size_t bytes) {
    for (const TensorInfo* tensor : sources) checkpoint.release(*tensor);
    state.done += bytes;
    if (progress) progress(state);
  };
  // `n` pieces of `bytes` each. Pages of the file are given back every kLoadStep, not once per tensor: an output head of
  // 2.3 GB would be resident twice.
  const auto pieces = [&](const std::vector<const TensorInfo*>& sources, int n, size_t bytes, const auto& pack) {
    const int step = static_cast<int>(std::max<size_t>(1, kLoadStep / std::max<size_t>(1, bytes)));
    for (int first = 0; first < n; first += step) {
      const int count = std::min(step, n - first);
      for_all(team, count, [&](int i) { pack(first + i); });
      finished(sources, bytes * count);
    }
  };
  for (Matrix& m : matrices) {
    std::byte* codes = take(m.w.code_bytes() * m.copies);
    std::byte* scales = m.w.scale_bytes() ? take(m.w.scale_bytes() * m.copies) : nullptr;
    const int panels = m.w.panels();
    pieces(m.sources, panels * m.copies, m.w.panel_bytes() + m.w.panel_scale_bytes(), [&](int i) {
      const size_t at = static_cast<size_t>(i);
      m.pack(i / panels, i % panels, codes + at * m.w.panel_bytes(),
             scales ? scales + at * m.w.panel_scale_bytes() : nullptr);
    });
    m.w.codes = codes;
    m.w.scales = scales;
    graph.bind(m.codes, codes);
    if (scales) graph.bind(m.scales, scales);
  }
  for (Vector& v : vectors) {
    std::byte* p = take(v.count * sizeof(float));
    v.fill(reinterpret_cast<float*>(p));
    graph.bind(v.slot, p);
    finished(v.sources, v.count * sizeof(float));
  }
  for (Table& t : tables) {
    std::byte* p = take(t.bytes);
    const size_t row_bytes = t.bytes / t.rows;
    constexpr size_t kRows = 256;
    pieces(t.sources, static_cast<int>((t.rows + kRows - 1) / kRows), kRows * row_bytes, [&](int i) {
      const size_t first = static_cast<size_t>(i) * kRows;
      t.fill(first, std::min(kRows, t.rows - first), p + first * row_bytes);
    });
    graph.bind(t.slot, p);
  }
  checkpoint.check_unchanged();
}

}  // namespace weft
