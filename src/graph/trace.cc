#include "graph/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>

#include "base/check.h"

namespace weft {

Trace::Trace(const Graph& graph, int threads, size_t limit)
    : graph_(graph), start_(now()), limit_(limit), threads_(threads) {
  for (std::vector<Event>& events : threads_) events.reserve(limit);
}

int64_t Trace::now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Trace::begin_step(const StepHeader& step) {
  Step s{now(), step.tokens, {}};
  for (const Node& node : graph_.nodes()) s.cost.push_back(node.cost(node.args.data(), step));
  steps_.push_back(std::move(s));
}

void Trace::record(int thread, const Event& event) {
  std::vector<Event>& events = threads_[thread];
  if (events.size() < limit_) events.push_back(event);
}

std::vector<Trace::NodeSpan> Trace::last_step() const {
  std::vector<NodeSpan> out(graph_.nodes().size());
  for (size_t i = 0; i < out.size(); ++i) out[i].cost = steps_.back().cost[i];
  for (const std::vector<Event>& events : threads_)
    for (auto e = events.rbegin(); e != events.rend() && e->begin >= steps_.back().begin; ++e) {
      NodeSpan& span = out[e->node];
      span.begin = span.begin ? std::min(span.begin, e->begin) : e->begin;
      span.end = std::max(span.end, e->end);
    }
  return out;
}

std::vector<double> Trace::busy() const {
  std::vector<double> out(graph_.nodes().size());
  for (const std::vector<Event>& events : threads_)
    for (const Event& e : events) out[e.node] += static_cast<double>(e.end - e.begin) * 1e-9;
  return out;
}

namespace {

constexpr int kThreads = 1, kStreams = 2;  // the two processes of the picture

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string row(const char* what, int process, int row, const std::string& name) {
  return fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":"{}"}}}},)"
                     "\n",
                     what, process, row, name);
}

}  // namespace

std::string Trace::events() const {
  const std::vector<Node>& nodes = graph_.nodes();
  std::string out;
  const auto us = [&](int64_t t) { return static_cast<double>(t - start_) / 1e3; };
  const auto bar = [&](int process, int row, const Node& node, int64_t begin, int64_t end,
                       const std::string& more) {
    out += fmt::format(
        R"({{"ph":"X","name":"{}","cat":"{}","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"args":{{"node":"{}"{}}}}},)"
        "\n",
        node.op, node.op, process, row, us(begin), static_cast<double>(end - begin) / 1e3,
        escaped(node.label), more);
  };
  const auto step_of = [&](int64_t t) {
    const auto after = std::upper_bound(steps_.begin(), steps_.end(), t,
                                        [](int64_t value, const Step& s) { return value < s.begin; });
    return static_cast<size_t>(after - steps_.begin()) - 1;
  };
  std::map<std::pair<size_t, int>, std::pair<int64_t, int64_t>>
      spans;  // of a node in a step: first begin, last end
  for (size_t thread = 0; thread < threads_.size(); ++thread) {
    out += row("thread_name", kThreads, static_cast<int>(thread), fmt::format("thread {}", thread));
    for (const Event& e : threads_[thread]) {
      bar(kThreads, static_cast<int>(thread), nodes[e.node], e.begin, e.end,
          fmt::format(R"(,"task":{})", e.task));
      const auto [it, fresh] = spans.try_emplace({step_of(e.begin), e.node}, e.begin, e.end);
      if (!fresh) it->second = {std::min(it->second.first, e.begin), std::max(it->second.second, e.end)};
    }
  }
  int lanes = 0;
  for (const auto& [key, span] : spans) {
    const auto& [step, index] = key;
    const Node& node = nodes[index];
    lanes = std::max(lanes, node.lane + 1);
    const Cost& cost = steps_[step].cost[index];
    bar(kStreams, node.lane, node, span.first, span.second,
        fmt::format(R"(,"step":{},"tokens":{},"bytes":{:.0f},"flops":{:.0f})", step, steps_[step].tokens,
                    cost.bytes, cost.flops));
  }
  for (int lane = 0; lane < lanes; ++lane)
    out += row("thread_name", kStreams, lane, fmt::format("stream {}", lane));
  return out;
}

void Trace::write(const std::string& path) const {
  std::string text = "[\n" + row("process_name", kThreads, 0, "threads") +
                     row("process_name", kStreams, 0, "streams") + events();
  if (text.ends_with(",\n")) text.resize(text.size() - 2);
  text += "\n]\n";
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (!file) fail("--trace {}: the file cannot be opened for writing", path);
  const bool whole = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !whole)
    fail("--trace {}: the file could not be written whole (disk full?)", path);
}

}  // namespace weft
