#include "app/bench_lab.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "app/bench.h"
#include "base/cpu.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Prober {
 public:
  Prober(const KernelTable& kernels, int threads)
      : kernels_(kernels),
        threads_(threads),
        team_(threads, false, kernels.thread_init),
        sink_(16 * threads) {}

  // `amount` of one round, in all threads together. A sample takes at least 10 ms.
  Rate rate(Probe kind, std::byte* data, size_t bytes, double amount) {
    ProbeArgs args = {kind, data, bytes, 1, sink_.data()};
    const auto timed = [&] {
      const Clock::time_point start = Clock::now();
      team_.run(threads_, [&](int task, int) { kernels_.probe(args, {&step_, task, threads_, nullptr}); });
      return seconds_since(start);
    };
    timed();
    while (timed() < 0.01 && args.rounds < 1 << 24) args.rounds *= 2;
    std::vector<double> rates;
    for (int i = 0; i < 7; ++i) rates.push_back(amount * args.rounds / timed());
    return summary(rates);
  }
  Rate fork_join() {
    std::vector<double> rates;
    for (int i = 0; i < 8; ++i) {
      const Clock::time_point start = Clock::now();
      for (int j = 0; j < 2000; ++j) team_.run(threads_, [](int, int) {});
      if (i) rates.push_back(2000 / seconds_since(start));
    }
    return summary(rates);
  }

 private:
  static Rate summary(const std::vector<double>& rates) {
    const auto [low, high] = std::minmax_element(rates.begin(), rates.end());
    const double middle = median(rates);
    return {middle, (*high - *low) / middle};
  }
  const KernelTable& kernels_;
  int threads_;
  Team team_;
  std::vector<float> sink_;
  StepHeader step_;
};

}  // namespace

Ceilings measure_ceilings(const KernelTable& kernels, int threads) {
  Ceilings c;
  c.threads = threads;
  Prober prober(kernels, threads);
  Lab lab(kernels, 1, false);
  const auto data = static_cast<std::byte*>(lab.operand(16, 1024));
  c.product = prober.rate(Probe::product, data, 4096, kProbeOperations * threads);
  if (kernels.int8_product) c.int8 = prober.rate(Probe::product_int8, data, 4096, kProbeOperations * threads);
  c.fma = prober.rate(Probe::fma, data, 4096, kProbeOperations * threads);
  const Topology machine = topology();
  // Half of an L2; far beyond the L2s but a small share of an L3 that strangers use too.
  const size_t l2 = (machine.l2 ? machine.l2 : size_t{1} << 20) / 2 * threads;
  const size_t l3 = std::min(machine.l3 ? machine.l3 / 2 : size_t{16} << 20,
                             std::max<size_t>(8 * machine.l2 * threads, size_t{16} << 20));
  const size_t dram = static_cast<size_t>(kColdBytes);
  std::byte* memory = lab.room(dram);
  // Reads of pages never written would all hit one zero page.
  for (size_t at = 0; at < dram; at += 4096) memory[at] = std::byte{1};
  const auto both = [&](size_t bytes, Rate& read, Rate& write) {
    read = prober.rate(Probe::read, memory, bytes, static_cast<double>(bytes));
    write = prober.rate(Probe::write, memory, bytes, static_cast<double>(bytes));
  };
  both(l2, c.l2_read, c.l2_write);
  both(l3, c.l3_read, c.l3_write);
  both(dram, c.dram_read, c.dram_write);
  c.fork_join = prober.fork_join();
  return c;
}

Lab::Lab(const KernelTable& table, int threads, bool is_cold)
    : kernels(table),
      cold(is_cold),
      team_(threads, false, table.thread_init),
      scratch_(kScratchBytes * threads) {}

int Lab::copies(double bytes) const {
  return cold ? static_cast<int>(std::clamp(kColdBytes / std::max(bytes, 1.0) + 1, 1.0, 1e5)) : 1;
}

uint64_t Lab::bits() {
  state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
  return state_;
}
void Lab::fill_bf16(void* at, size_t count) {  // count a multiple of 4
  auto* p = static_cast<uint64_t*>(at);
  for (size_t i = 0; i < count / 4; ++i) p[i] = (bits() & 0x80FF80FF80FF80FFu) | 0x3E003E003E003E00u;
}
void Lab::fill_f32(void* at, size_t count) {  // count a multiple of 2
  auto* p = static_cast<uint64_t*>(at);
  for (size_t i = 0; i < count / 2; ++i) p[i] = (bits() & 0x80FFFFFF80FFFFFFu) | 0x3E0000003E000000u;
}

std::byte* Lab::room(size_t bytes) {
  buffers_.emplace_back(bytes + 4096, "bench buffer");
  return buffers_.back().as<std::byte>();
}
void* Lab::operand_room(int rows, int ld) {
  return room(static_cast<size_t>(round_up(rows, 16)) * ld * kernels.operand_bytes());
}
float* Lab::f32_room(size_t count) {
  return reinterpret_cast<float*>(room(count * sizeof(float)));
}
int32_t* Lab::ints(const std::vector<int32_t>& values) {
  auto* p = reinterpret_cast<int32_t*>(room(values.size() * 4));
  std::copy(values.begin(), values.end(), p);
  return p;
}
void* Lab::operand(int rows, int ld) {
  void* at = operand_room(rows, ld);
  const size_t count = static_cast<size_t>(round_up(rows, 16)) * ld;
  kernels.bf16_operands ? fill_bf16(at, count) : fill_f32(at, count);
  return at;
}
float* Lab::f32(size_t count) {
  float* at = f32_room(count + 16);
  fill_f32(at, (count + 1) / 2 * 2);
  return at;
}

PackedWeight Lab::weight(WeightFormat format, int n, int k, int copies) {
  PackedWeight w;
  w.n = n, w.k = k, w.format = format;
  const size_t codes = w.code_bytes(), scales = w.scale_bytes();
  std::byte* at = room(codes * copies);
  switch (format) {
    case WeightFormat::bf16:
      fill_bf16(at, codes / 2);
      break;
    case WeightFormat::f32:
      fill_f32(at, codes / 4);
      break;
    case WeightFormat::e4m3:
    case WeightFormat::mxfp4:
      for (size_t i = 0; i < codes / 8; ++i)  // exponents below 8: no NaN among the e4m3 codes
        reinterpret_cast<uint64_t*>(at)[i] = bits() & 0xBFBFBFBFBFBFBFBFu;
      break;
  }
  for (int i = 1; i < copies; ++i) std::memcpy(at + codes * i, at, codes);
  w.codes = at;
  if (scales) {
    std::byte* s = room(scales * copies);
    if (format == WeightFormat::e4m3)
      fill_f32(s, scales / 4 * copies);
    else
      std::memset(s, 124, scales * copies);
    w.scales = s;
  }
  return w;
}

StepHeader& Lab::rows(int tokens) {
  return sequences({{0, tokens}});
}

StepHeader& Lab::sequences(const std::vector<Sequence>& sequences) {
  Step& s = steps_.emplace_back();
  int stride = 0;
  for (const Sequence& q : sequences)
    stride = std::max(stride, (q.position + q.length + kPageTokens - 1) / kPageTokens);
  pages_ = stride * static_cast<int>(sequences.size());
  s.table.resize(pages_);
  std::iota(s.table.begin(), s.table.end(), 0);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& q = sequences[i];
    const int slot = static_cast<int>(i);
    s.span.push_back({static_cast<int32_t>(s.position.size()), q.length, q.position, slot, slot});
    for (int r = 0; r < q.length; ++r) s.position.push_back(q.position + r), s.span_of.push_back(slot);
  }
  s.zeros.resize(s.position.size());
  StepHeader& h = s.header;
  h.tokens = static_cast<int>(s.position.size()), h.spans = static_cast<int>(s.span.size());
  h.token = s.zeros.data(), h.position = s.position.data(), h.span_of = s.span_of.data(),
  h.span = s.span.data();
  h.block_table = s.table.data(), h.table_stride = stride;
  return h;
}

}  // namespace weft
