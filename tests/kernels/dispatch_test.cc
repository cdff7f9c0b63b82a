// Which kernel table runs, on invented machines. That a table's name is also what its object was compiled for is the
// matter of tests/structure/isa_object.sh: together they prove that a forced ISA is the one that runs.
#include "kernels/dispatch.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "base/check.h"

namespace weft {
namespace {

// WEFT_ISA for the length of a test.
class Variable {
 public:
  explicit Variable(const char* value) {
    if (const char* old = std::getenv("WEFT_ISA")) before_ = old;
    if (value) setenv("WEFT_ISA", value, 1);
    else unsetenv("WEFT_ISA");
  }
  ~Variable() {
    if (before_) setenv("WEFT_ISA", before_->c_str(), 1);
    else unsetenv("WEFT_ISA");
  }

 private:
  std::optional<std::string> before_;
};

CpuFeatures everything() {
  CpuFeatures f;
  f.avx2 = f.avx512 = f.avx512_bf16 = f.avx512_vnni = f.avx512_vbmi = f.avx512_vbmi2 = true;
  f.amx_tile = f.amx_bf16 = f.amx_int8 = true;
  return f;
}

// Zen 4: AVX-512 in full, no tiles.
CpuFeatures no_tiles() {
  CpuFeatures f = everything();
  f.amx_tile = f.amx_bf16 = f.amx_int8 = false;
  f.no_amx = "missing: AMX-TILE";
  return f;
}

CpuFeatures bare() {
  CpuFeatures f;
  f.no_avx2 = "missing: FMA";
  f.no_avx512 = "missing: AVX512F";
  f.no_amx = "missing: AMX-BF16";
  return f;
}

std::string refusal(const std::string& wanted, const CpuFeatures& features) {
  try {
    return "chose " + std::string(choose_kernels(wanted, features).isa);
  } catch (const UsageError& error) {
    return error.what();
  }
}

TEST(Dispatch, ListsEveryUnitBestFirst) {
  std::string names;
  for (const IsaChoice& choice : isa_choices(everything())) {
    EXPECT_EQ(choice.missing, "") << choice.name;
    EXPECT_EQ(choice.name, choice.table->isa);
    names += choice.name + " ";
  }
  EXPECT_EQ(names, "amx avx512 avx2 portable ");
}

TEST(Dispatch, TakesTheBestUsable) {
  const Variable unset(nullptr);
  EXPECT_STREQ(choose_kernels("", everything()).isa, "amx");
  EXPECT_STREQ(choose_kernels("", no_tiles()).isa, "avx512");
  CpuFeatures old = bare();
  old.avx2 = true;
  old.no_avx2.clear();
  EXPECT_STREQ(choose_kernels("", old).isa, "avx2");
  EXPECT_STREQ(choose_kernels("", bare()).isa, "portable");
}

TEST(Dispatch, EachNameGivesItsOwnTable) {
  const Variable unset(nullptr);
  for (const char* name : {"portable", "avx2", "avx512", "amx"}) {
    EXPECT_STREQ(choose_kernels(name, everything()).isa, name);
    const Variable set(name);
    EXPECT_STREQ(choose_kernels("", everything()).isa, name);
  }
}

TEST(Dispatch, TheOptionWinsOverTheVariable) {
  const Variable set("portable");
  EXPECT_STREQ(choose_kernels("avx2", everything()).isa, "avx2");
}

TEST(Dispatch, AnEmptyVariableIsNone) {
  const Variable set("");
  EXPECT_STREQ(choose_kernels("", no_tiles()).isa, "avx512");
}

TEST(Dispatch, AnUnusableNameSaysWhatIsMissing) {
  const Variable unset(nullptr);
  EXPECT_EQ(refusal("amx", no_tiles()), "--isa=amx: this machine cannot run it: missing: AMX-TILE");
  EXPECT_EQ(refusal("avx2", bare()), "--isa=avx2: this machine cannot run it: missing: FMA");
  const Variable set("avx512");
  EXPECT_EQ(refusal("", bare()), "WEFT_ISA=avx512: this machine cannot run it: missing: AVX512F");
}

TEST(Dispatch, AnUnknownNameListsTheUsable) {
  const Variable unset(nullptr);
  EXPECT_EQ(refusal("neon", no_tiles()), "--isa=neon: unknown instruction set; usable here: avx512, avx2, portable");
  EXPECT_EQ(refusal("AVX2", bare()), "--isa=AVX2: unknown instruction set; usable here: portable");
  const Variable set("sse");
  EXPECT_EQ(refusal("", bare()), "WEFT_ISA=sse: unknown instruction set; usable here: portable");
}

TEST(Dispatch, TilesAreConfiguredWhereThereAreSome) {
  for (const IsaChoice& choice : isa_choices(everything())) {
    const bool wide = choice.name == "amx" || choice.name == "avx512";
    EXPECT_EQ(choice.table->thread_init != nullptr, choice.name == "amx") << choice.name;
    EXPECT_EQ(choice.table->bf16_operands, wide) << choice.name;
    EXPECT_EQ(choice.table->int8_product, wide) << choice.name;
    EXPECT_EQ(choice.table->operand_bytes(), wide ? 2 : 4) << choice.name;
  }
}

TEST(Dispatch, ExplainsEveryUnit) {
  EXPECT_EQ(explain_isas(no_tiles()),
            "amx       missing: AMX-TILE\n"
            "avx512    usable\n"
            "avx2      usable\n"
            "portable  usable\n");
}

// On the machine at hand: what is said to be usable runs.
TEST(Dispatch, UsableTablesRunHere) {
  const Variable unset(nullptr);
  for (const IsaChoice& choice : isa_choices(cpu_features())) {
    if (!choice.missing.empty()) {
      EXPECT_NE(refusal(choice.name, cpu_features()).find(choice.missing), std::string::npos);
      continue;
    }
    const KernelTable& table = choose_kernels(choice.name, cpu_features());
    if (table.thread_init) table.thread_init();
    const float x[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float out[16] = {};
    const CopyArgs args = {.x = x, .ld_x = 16, .width = 16, .rows = Rows::tokens, .out = out, .ld_out = 16};
    StepHeader step;
    step.tokens = 1;
    table.copy(args, {&step, 0, 1, nullptr});
    for (int i = 0; i < 16; ++i) EXPECT_EQ(out[i], x[i]) << choice.name;
  }
}

}  // namespace
}  // namespace weft
