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

constexpr size_t kWindow = size_t{256} << 20;

}  // namespace

Prober::Prober(const KernelTable& kernels, int threads)
    : kernels_(kernels),
      team_(threads, false, kernels.thread_init),
      values_(4096),
      memory_(static_cast<size_t>(kColdBytes)),
      sink_(16 * threads) {
  Lab lab(kernels, 1, false);
  std::memcpy(values_.data(), lab.operand(16, 128), 4096);
  // Pages never written would all read one page of zeros.
  for (size_t at = 0; at < memory_.size(); at += 4096) memory_.data()[at] = 1;
}

std::vector<Ceiling> Prober::ceilings() const {
  const Topology machine = topology();
  // Half of an L2; far beyond the L2s but a small share of an L3 that strangers use too.
  const size_t l2_size = machine.l2 ? machine.l2 : size_t{1} << 20;
  const size_t l2 = l2_size / 2 * threads();
  const size_t l3 = std::min(machine.l3 ? machine.l3 / 2 : size_t{16} << 20,
                             std::max<size_t>(8 * l2_size * threads(), size_t{16} << 20));
  std::vector<Ceiling> all = {{"product", Probe::product}};
  if (kernels_.int8_product) all.push_back({"int8", Probe::product_int8});
  all.push_back({"fma", Probe::fma});
  all.push_back({"l2 read", Probe::read, l2}), all.push_back({"l2 write", Probe::write, l2});
  all.push_back({"l3 read", Probe::read, l3}), all.push_back({"l3 write", Probe::write, l3});
  all.push_back({"dram read", Probe::read, kWindow}), all.push_back({"dram write", Probe::write, kWindow});
  return all;
}

double Prober::timed(const Ceiling& ceiling, int rounds) {
  std::byte* data = values_.as<std::byte>();
  if (ceiling.bytes) {
    if (ceiling.bytes == kWindow) window_ = window_ + 2 * kWindow <= memory_.size() ? window_ + kWindow : 0;
    data = memory_.as<std::byte>(ceiling.bytes == kWindow ? window_ : 0);
  }
  const ProbeArgs args = {ceiling.kind, data, ceiling.bytes, rounds, sink_.data()};
  const StepHeader step;
  const Clock::time_point start = Clock::now();
  team_.run(threads(), [&](int task, int) { kernels_.probe(args, {&step, task, threads(), nullptr}); });
  const double amount = ceiling.bytes ? static_cast<double>(ceiling.bytes) : kProbeOperations * threads();
  return amount * rounds / seconds_since(start);
}

double Prober::once(const Ceiling& ceiling) {
  int& rounds = rounds_[ceiling.name];
  if (rounds == 0) {
    rounds = 1;
    const double amount = ceiling.bytes ? static_cast<double>(ceiling.bytes) : kProbeOperations * threads();
    timed(ceiling, 1);
    while (amount * rounds / timed(ceiling, rounds) < 0.01 && rounds < 1 << 24) rounds *= 2;
  }
  return timed(ceiling, rounds);
}

namespace {
Rate summary(const std::vector<double>& rates) {
  const auto [low, high] = std::minmax_element(rates.begin(), rates.end());
  const double middle = median(rates);
  return {middle, (*high - *low) / middle};
}
}  // namespace

Rate Prober::rate(const Ceiling& ceiling) {
  std::vector<double> rates;
  for (int i = 0; i < 8; ++i) {
    const double r = once(ceiling);
    if (i) rates.push_back(r);
  }
  return summary(rates);
}

Rate Prober::fork_join() {
  std::vector<double> rates;
  for (int i = 0; i < 8; ++i) {
    const Clock::time_point start = Clock::now();
    for (int j = 0; j < 2000; ++j) team_.run(threads(), [](int, int) {});
    if (i) rates.push_back(2000 / seconds_since(start));
  }
  return summary(rates);
}

Lab::Lab(const KernelTable& table, int threads, bool is_cold, bool with_others)
    : kernels(table),
      cold(is_cold),
      compare(with_others),
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
  auto* p = buffers_.back().as<std::byte>();
  std::memset(p, 0, bytes);  // a page is the system's work at its first write: five times a norm's
  return p;
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
    default:  // no NaN among e4m3 codes, no -0 in any: a low bit set, exponents below 8
      for (size_t i = 0; i < codes / 8; ++i)
        reinterpret_cast<uint64_t*>(at)[i] = (bits() & 0xBFBFBFBFBFBFBFBFu) | 0x1111111111111111u;
      break;
  }
  for (int i = 1; i < copies; ++i) std::memcpy(at + codes * i, at, codes);
  w.codes = at;
  if (scales) {
    std::byte* s = room(scales * copies);
    if (format == WeightFormat::e4m3 || format == WeightFormat::int8)
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
