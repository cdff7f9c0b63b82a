#include "app/explain.h"

#include <fmt/format.h>

#include <vector>

#include "app/report.h"
#include "kernels/work.h"

namespace weft {
namespace {

// A step of one sequence: rows [0, n) at positions from `depth`.
struct ExampleStep {
  std::vector<int32_t> zeros, position;
  Span span;
  StepHeader header;
  ExampleStep(int n, int depth) : zeros(n), position(n), span{0, n, depth, 0, 0} {
    for (int i = 0; i < n; ++i) position[i] = depth + i;
    header.tokens = n, header.spans = 1, header.logit_rows = 1;
    header.token = header.span_of = header.logit_row = header.block_table = zeros.data();
    header.position = position.data();
    header.span = &span;
  }
};

int tasks(const Node& node, const StepHeader& step, int threads) {
  const void* args = node.args.data();
  return task_count(node.units(args, step), node.cost(args, step), threads);
}

std::string waits_for(const Graph& graph, const Node& node) {
  std::string out;
  for (const int before : node.after) {
    if (!out.empty()) out += ", ";
    out += fmt::format("{} {}", before, graph.nodes()[before].op);
  }
  return out.empty() ? "nothing" : out;
}

}  // namespace

void explain_steps(const Model& model, int threads, int depth) {
  const Graph& graph = model.parts().graph;
  const int chunk = model.parts().options.max_tokens;
  const ExampleStep one(1, depth), many(chunk, depth);
  fmt::print("\n{} nodes in {} stages, {} layers; {} threads, behind {} tokens of context\n",
             graph.nodes().size(), graph.stages(), model.config().layers.size(), threads, depth);
  fmt::print(
      "values of a step: {} in an arena (lifetimes in every order the dependencies allow), {} had none "
      "shared "
      "memory\n",
      human_bytes(graph.arena_bytes()), human_bytes(graph.value_bytes()));
  fmt::print("a task is at least 20 KB or 100 kflop of its node; 8 per thread are enough to balance\n\n");
  fmt::print("{:>5} {:>6} {:>6}  {:<18} {:>6} {:>10} {:>6} {:>10} {:>10}  {:<40} {}\n", "node", "stage",
             "stream", "op", "tasks", "bytes", "tasks", "bytes", "Mflop", "label", "waits for");
  fmt::print("{:>5} {:>6} {:>6}  {:<18} {:>17} {:>28}\n", "", "", "", "", "1 token",
             fmt::format("{} tokens", chunk));
  Cost all_one, all_many;
  for (size_t i = 0; i < graph.nodes().size(); ++i) {
    const Node& node = graph.nodes()[i];
    const Cost a = node.cost(node.args.data(), one.header), b = node.cost(node.args.data(), many.header);
    all_one.bytes += a.bytes, all_one.flops += a.flops, all_many.bytes += b.bytes, all_many.flops += b.flops;
    fmt::print("{:>5} {:>6} {:>6}  {:<18} {:>6} {:>10} {:>6} {:>10} {:>10.2f}  {:<40} {}\n", i, node.stage,
               node.lane, node.op, tasks(node, one.header, threads),
               human_bytes(static_cast<size_t>(a.bytes)), tasks(node, many.header, threads),
               human_bytes(static_cast<size_t>(b.bytes)), b.flops / 1e6, node.label, waits_for(graph, node));
  }
  fmt::print("\nof one token: {} and {:.1f} Mflop; of {} tokens: {} and {:.1f} Mflop\n",
             human_bytes(static_cast<size_t>(all_one.bytes)), all_one.flops / 1e6, chunk,
             human_bytes(static_cast<size_t>(all_many.bytes)), all_many.flops / 1e6);
}

}  // namespace weft
