// weft inspect, plan, verify, bench.
#include <cmath>
#include <set>
#include <string>

#include "app/bench.h"
#include "kernels/dispatch.h"
#include "model/model.h"
#include "tools_support.h"

namespace weft {
namespace {

using namespace test;

// ---- inspect

TEST(Inspect, CountsLayersParametersAndBytes) {
  Scratch scratch;
  SynthSpec spec = tiny_spec("kimi_k31");
  spec.format = SynthFormat::mxfp4;
  const SynthReport made = synthesize(spec, scratch / "m");
  const Ran ran = weft_command({"inspect", scratch / "m", "--json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const Json j = ran.json();
  EXPECT_EQ(j["layers_by_kind"]["KDA + dense"], Json::array({0}));
  EXPECT_EQ(j["layers_by_kind"]["KDA + MoE"], Json::array({1, 2}));
  EXPECT_EQ(j["layers_by_kind"]["DSA + MoE"], Json::array({3}));
  EXPECT_EQ(j["parameters"], made.parameters);
  EXPECT_EQ(j["used_bytes"], made.bytes);
  // Of 8 experts 3 are read; of the embedding one row.
  const size_t expert = 3 * 32 * 32, routed = 3 * 8 * expert, embedding = 160 * 64;
  EXPECT_EQ(j["active_parameters"], made.parameters - routed + 3 * 3 * expert - embedding);
  // 4.25 bits per value of an expert
  EXPECT_EQ(j["bytes_by_dtype"]["U8"], routed / 2 + routed / 32);
  EXPECT_EQ(j["bytes_by_dtype"]["BF16"].get<size_t>() + j["bytes_by_dtype"]["F32"].get<size_t>() +
                j["bytes_by_dtype"]["U8"].get<size_t>(),
            made.bytes);
  EXPECT_EQ(j["config"]["indexer"]["topk"], 16);
  EXPECT_EQ(j["config"]["attn_res_block"], 4);
  EXPECT_EQ(j["unused"], "");

  const std::string text = weft_command({"inspect", "-m", scratch / "m"}).out;
  for (const char* part :
       {"kimi_k31, 4 layers", "2 KDA + MoE: 1, 2", "attention residuals", "3 of 8 experts", "top 16"})
    EXPECT_NE(text.find(part), text.npos) << part << " in\n" << text;
}

TEST(Inspect, NamesWhatIsNotUsedAndWarns) {
  const Ran ran = weft_command({"inspect", golden_folder("glm5_next-tiny-vision"), "--json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const Json j = ran.json();
  EXPECT_NE(j["unused"].get<std::string>().find("model.visual"), std::string::npos) << j["unused"];
  EXPECT_LT(j["tensors_used"].get<int>(), j["tensors"].get<int>());
  EXPECT_LT(j["used_bytes"].get<size_t>(), j["file_bytes"].get<size_t>());
  EXPECT_EQ(j["config"]["mtp_layers"], 1);

  const Json odd = weft_command({"inspect", golden_folder("kimi_k31-tiny-alt"), "--json"}).json();
  EXPECT_EQ(odd["layers_by_kind"]["DSA + MoE"], Json::array({3, 7, 8}));
  const Json shared = weft_command({"inspect", golden_folder("glm_moe_dsa-tiny"), "--json"}).json();
  EXPECT_EQ(shared["layers_by_kind"]["DSA, shared index + MoE"], Json::array({2, 3, 5}));

  Scratch scratch;
  copy_folder(golden_folder("kimi_linear-tiny"), scratch / "m");
  Json config = parse_json_file(scratch / "m/config.json");
  config["dtype"] = "strange";
  std::ofstream(scratch / "m/config.json") << config.dump();
  EXPECT_NE(weft_command({"inspect", scratch / "m"}).out.find("warning: "), std::string::npos);
}

TEST(Inspect, FailsOnAFolderWithoutAModel) {
  Scratch scratch;
  const Ran ran = weft_command({"inspect", scratch / "none"});
  EXPECT_EQ(ran.code, 1);
  EXPECT_NE(ran.err.find("none"), ran.err.npos);
  EXPECT_EQ(weft_command({"inspect"}).code, 2);
}

// ---- plan

TEST(Plan, EqualsWhatIsAllocated) {
  for (const std::string& family : synth_families()) {
    Scratch scratch;
    synthesize(tiny_spec(family), scratch / "m");
    const Ran ran = weft_command({"plan", scratch / "m", "-c", "1000", "--sequences", "3", "-t", "2", "-b",
                                  "64", "--checkpoints", "4", "--isa", "portable", "--json"});
    ASSERT_EQ(ran.code, 0) << ran.err;
    const Json j = ran.json();
    const KernelTable& kernels = choose_kernels("portable", cpu_features());
    BuildOptions build;
    build.max_tokens = 64;
    Model model(scratch / "m", kernels, build);
    const int checkpoints = model.cache_shape().slot_bytes ? 4 : 0;
    Caches caches(model.cache_shape(), {3 * 16, 3, checkpoints, 1000});  // 1000 tokens: 16 pages of 64
    EXPECT_EQ(
        j["latent_bytes"].get<size_t>() + j["index_bytes"].get<size_t>() + j["state_bytes"].get<size_t>(),
        caches.usage().bytes_total)
        << family;
    EXPECT_EQ(j["weights_bytes"], model.parts().weights.bytes());
    EXPECT_EQ(j["total_bytes"].get<size_t>(),
              j["weights_bytes"].get<size_t>() + j["latent_bytes"].get<size_t>() +
                  j["index_bytes"].get<size_t>() + j["state_bytes"].get<size_t>() +
                  j["scratch_bytes"].get<size_t>());
    EXPECT_GT(j["scratch_bytes"].get<size_t>(), 2 * kScratchBytes);
    EXPECT_TRUE(j["fits"].get<bool>());
  }
}

TEST(Plan, SaysWhatIsMissingAndTheEngineRefusesTheSame) {
  Scratch scratch;
  SynthSpec spec = tiny_spec("kimi_k3");
  spec.kv_lora = 512, spec.rope = 64;
  synthesize(spec, scratch / "m");
  const std::vector<std::string> big = {"plan", scratch / "m", "-c", "1048576", "--sequences", "1000"};
  const Ran text = weft_command(big);
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_NE(text.out.find("does not fit"), text.out.npos) << text.out;
  EXPECT_NE(text.out.find("missing"), text.out.npos) << text.out;
  std::vector<std::string> as_json = big;
  as_json.push_back("--json");
  EXPECT_FALSE(weft_command(as_json).json()["fits"].get<bool>());
  EngineOptions options;
  options.model = scratch / "m";
  options.context = 1048576;
  options.sequences = 1000;
  try {
    Engine engine(options);
    FAIL() << "loaded";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("is available"), std::string::npos) << error.what();
  }
  // Reads no weights: a file cut short in its data would be refused on opening, one of zeros plans alike.
  EXPECT_EQ(weft_command({"plan", scratch / "m", "-c", "1048577"}).code, 2);
  EXPECT_EQ(weft_command({"plan", scratch / "m", "--sequences", "0"}).code, 2);
}

// ---- verify

TEST(Verify, PassesOnTheGoldensAndFailsOnOtherWeights) {
  const std::string golden = golden_folder("kimi_linear-tiny");
  const Ran ran = weft_command({"verify", golden, golden_folder("kimi_k31-tiny"), "--isa", "portable",
                                "--threads", "1,2", "--chunk", "0,7", "--json"});
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  const Json j = ran.json();
  ASSERT_EQ(j.size(), 4u);
  EXPECT_EQ(j[0]["threads"], 1);
  EXPECT_EQ(j[1]["threads"], 2);
  EXPECT_EQ(j[3]["family"], "kimi_k31");
  EXPECT_TRUE(j[0]["rows"][0]["pass"].get<bool>());
  EXPECT_LE(j[0]["rows"][0]["max_error"].get<double>(), j[0]["rows"][0]["bound"].get<double>());

  Scratch scratch;
  copy_folder(golden, scratch / "m");
  Json config = parse_json_file(scratch / "m/config.json");
  config["routed_scaling_factor"] = 2.4;  // a mistake of 2 %
  std::ofstream(scratch / "m/config.json") << config.dump();
  const Ran wrong = weft_command({"verify", scratch / "m", "--isa", "portable"});
  EXPECT_EQ(wrong.code, 1);
  EXPECT_NE(wrong.out.find("FAIL"), wrong.out.npos) << wrong.out;
}

TEST(Verify, TakesCasesByName) {
  const std::string golden = golden_folder("kimi_linear-tiny");
  const Json all = weft_command({"verify", golden, "--isa", "portable", "--json"}).json()[0]["rows"];
  ASSERT_GE(all.size(), 2u);
  const std::string name = all[1]["case"];
  const Json one =
      weft_command({"verify", golden, "--isa", "portable", "--cases", name, "--json"}).json()[0]["rows"];
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0]["case"], name);
  EXPECT_EQ(weft_command({"verify", golden, "--cases", "no-such-case"}).code, 2);
  EXPECT_EQ(weft_command({"verify", golden, "--isa", "mmx"}).code, 2);
  EXPECT_EQ(weft_command({"verify", golden, "--threads", "0"}).code, 2);
  EXPECT_EQ(weft_command({"verify"}).code, 2);
}

TEST(Verify, NamesTheMissingFile) {
  Scratch scratch;
  synthesize(tiny_spec("kimi_linear"), scratch / "m");
  const Ran ran = weft_command({"verify", scratch / "m"});
  EXPECT_EQ(ran.code, 1);
  EXPECT_NE(ran.err.find("golden.json"), ran.err.npos) << ran.err;
  copy_folder(golden_folder("kimi_linear-tiny"), scratch / "n");
  fs::remove(scratch / "n/golden.safetensors");
  EXPECT_NE(weft_command({"verify", scratch / "n"}).err.find("golden.safetensors"), std::string::npos);
}

// ---- bench

TEST(Bench, MedianAndDeviationAreFinite) {
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({9, 1, 5}), 5);
  EXPECT_EQ(median({4, 1, 2, 9}), 3);
  EXPECT_EQ(deviation({}), 0);
  EXPECT_EQ(deviation({7}), 0);
  EXPECT_DOUBLE_EQ(deviation({1, 3}), std::sqrt(2.0));
}

TEST(Bench, RunsEveryTestAtEveryDepth) {
  for (const std::string& family : synth_families()) {
    Scratch scratch;
    synthesize(tiny_spec(family), scratch / "m");
    const Ran ran = weft_command({"bench", "model", "-m", scratch / "m", "-p", "1,40", "-n", "0,1,3", "-d",
                                  "0,70", "-r", "1", "-b", "32", "-t", "2", "--ops", "--json"});
    ASSERT_EQ(ran.code, 0) << family << ran.err;
    const Json j = ran.json();
    ASSERT_EQ(j.size(), 8u);
    const char* const kNames[] = {"pp1",       "pp40",       "tg1",       "tg3",
                                  "pp1 @ d70", "pp40 @ d70", "tg1 @ d70", "tg3 @ d70"};
    for (size_t i = 0; i < j.size(); ++i) {
      EXPECT_EQ(j[i]["test"], kNames[i]);
      ASSERT_TRUE(j[i]["tokens_per_s"].is_number());  // NaN and Inf are null in JSON
      EXPECT_GT(j[i]["tokens_per_s"].get<double>(), 0);
      EXPECT_EQ(j[i]["stddev"], 0.0);
      EXPECT_GT(j[i]["percent_of_bound"].get<double>(), 0);
      EXPECT_EQ(j[i]["threads"], 2);
      EXPECT_FALSE(j[i]["cpu"].get<std::string>().empty());
      EXPECT_GT(j[i]["peak_rss_bytes"].get<size_t>(), 0u);
      double share = 0;
      std::set<std::string> ops;
      for (const Json& op : j[i]["ops"]) share += op["share"].get<double>(), ops.insert(op["op"]);
      EXPECT_GT(share, 0);
      EXPECT_LE(share, 1);
      EXPECT_TRUE(ops.contains("gemm") && ops.contains("experts"));
    }
    EXPECT_EQ(j[5]["n_prompt"], 40);
    EXPECT_EQ(j[5]["n_gen"], 0);
    EXPECT_EQ(j[5]["n_depth"], 70);
  }
}

// Kernels at real sizes, against ceilings of the same run.
TEST(Bench, TimesKernels) {
  const Ran ran = weft_command(
      {"bench", "kernels", "gemm", "add_f32 1024x1024 m 1", "--hot", "-t", "1", "-r", "5", "--json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const Json j = ran.json();
  ASSERT_EQ(j.size(), 2u);  // m 1, m 16
  for (const Json& row : j) {
    EXPECT_EQ(row["kernel"], "gemm");
    EXPECT_EQ(row["threads"], 1);
    EXPECT_GT(row["seconds"].get<double>(), 0);
    EXPECT_GT(row["percent_of_bound"].get<double>(), 1);
    for (const char* field : {"case", "isa", "cpu", "gflops", "gbs", "bound", "compare"})
      EXPECT_TRUE(row.contains(field)) << field;
  }
  EXPECT_NEAR(j[0]["gflops"].get<double>() * j[0]["seconds"].get<double>(), 2 * 1024 * 1024 / 1e9, 1e-6);
  EXPECT_NE(ran.err.find("gemm bf16 add_f32"), ran.err.npos);
  EXPECT_EQ(weft_command({"bench", "kernels", "no such kernel"}).code, 2);
  EXPECT_EQ(weft_command({"bench", "kernels", "gemm", "-r", "4"}).code, 2);
  const Ran list = weft_command({"bench", "kernels", "--list", "moe"});
  EXPECT_EQ(list.out.find("gemm"), list.out.npos);
  EXPECT_NE(list.out.find("moe mxfp4"), list.out.npos);
  const Ran machine = weft_command({"bench", "machine", "-t", "1", "--json"});
  ASSERT_EQ(machine.code, 0) << machine.err;
  for (const Json& row : machine.json()) EXPECT_GT(row["value"].get<double>(), 0) << row["what"];
}

TEST(Bench, PrintsATableAndChecksItsFlags) {
  Scratch scratch;
  synthesize(tiny_spec("glm5_next"), scratch / "m");
  const Ran table = weft_command({"bench", "model", "-m", scratch / "m", "-p", "20", "-n", "2", "-r", "2"});
  EXPECT_EQ(table.code, 0) << table.err;
  for (const char* part : {"| model", "pp20", "tg2", "peak memory"})
    EXPECT_NE(table.out.find(part), table.out.npos);
  const Ran nothing = weft_command({"bench", "model", "-m", scratch / "m", "-p", "0", "-n", "0", "--json"});
  EXPECT_EQ(nothing.code, 0) << nothing.err;
  EXPECT_EQ(nothing.json(), Json::array());
  const auto code = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"bench", "model", "-m", scratch / "m"});
    return weft_command(more).code;
  };
  EXPECT_EQ(code({"-r", "0"}), 2);
  EXPECT_EQ(code({"-p", "-5"}), 2);
  EXPECT_EQ(code({"-p", "ten"}), 2);
  EXPECT_EQ(code({"-c", "10", "-p", "20"}), 2);
  EXPECT_EQ(code({"-d", "2000000000", "-p", "2000000000"}), 2);
  EXPECT_EQ(weft_command({"bench"}).code, 2);
}

}  // namespace
}  // namespace weft
