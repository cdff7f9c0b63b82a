// The command line: subcommands, the flags they share, exit codes.
//
// Each subcommand is one function that declares its flags and sets a callback; the callback does the work and
// says that something is wrong by throwing:
//   UsageError   exit 2, one line on stderr
//   Error        exit 1, one line on stderr
//   ExitCode     that code; everything has been said already
// Flags live in an object that the callback keeps alive:
//   void add_inspect(CLI::App& app) {
//     CLI::App* sub = app.add_subcommand("inspect", "Show what a checkpoint holds");
//     auto flags = std::make_shared<CommonFlags>();
//     add_model_flag(*sub, *flags);
//     sub->callback([flags] { ... });
//   }
// Results go to stdout, everything else to stderr. stdout is flushed and checked by run_cli, so that a full
// disk ends every subcommand with exit 1.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "engine/engine.h"

namespace weft {

inline constexpr const char* kVersion = "0.1.0";

inline constexpr int kExitDone = 0, kExitFailed = 1, kExitUsage = 2, kExitInterrupted = 130;

struct ExitCode {
  int code;
};

// Flags of every subcommand that runs a model; the names are llama.cpp's where it has one.
struct CommonFlags {
  std::string model;           // -m
  std::string isa;             // --isa, "" = best
  int threads = 0;             // -t, 0 = default_threads()
  std::string cpu_list, numa;  // --cpu-list, --numa: "" = as the system says
  int context = 0;             // -c, tokens; 0 = min(the model's, kDefaultContext)
  int chunk = 512;             // -b, tokens of one step
  std::string mla = "auto";    // --mla: auto, absorbed, expanded
  std::string index_cache = "bf16";   // --index-cache: bf16, mxfp8, int8
  std::string latent_cache = "bf16";  // --latent-cache: bf16, fp8
  std::string dsa = "sparse";  // --dsa: sparse, dense, recent
  std::string trace;           // --trace of the commands that have it: FILE
  std::string exec = "super";  // --exec: ops, streams, super
  std::string tier = "bf16";   // --tier: a name or a file
  std::string cache_dir;       // --cache-dir, "" = PackCache::default_folder()
  bool cache = true;           // --no-cache clears it
  bool check_memory = true;    // --no-memory-check clears it
};

// -m/--model DIR, also as the first positional argument unless that is for something else; required.
void add_model_flag(CLI::App& sub, CommonFlags& flags, bool positional = true);
// -m as above, -t, -c, -b, --isa, --mla, --index-cache, --latent-cache, --exec, --dsa, --tier, --cache-dir,
// --no-cache, --no-memory-check.
// Not positional where other arguments are.
void add_engine_flags(CLI::App& sub, CommonFlags& flags, bool positional = true);
EngineOptions engine_options(const CommonFlags& flags);
void add_dsa_flag(CLI::App& sub, std::string& mode);
DsaMode dsa_mode(const std::string& word);

void add_run(CLI::App& app);
void add_chat(CLI::App& app);
void add_tokenize(CLI::App& app);
void add_isa(CLI::App& app);
void add_cache(CLI::App& app);
void add_inspect(CLI::App& app);
void add_plan(CLI::App& app);
void add_synth(CLI::App& app);
void add_quantize(CLI::App& app);
void add_verify(CLI::App& app);
void add_eval(CLI::App& app);
void add_ask(CLI::App& app);
void add_bench(CLI::App& app);

// Parses, runs, reports; never throws. Returns the exit code.
int run_cli(int argc, char** argv);

}  // namespace weft
