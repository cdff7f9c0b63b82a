#include "app/cli.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "base/check.h"
#include "base/cpu.h"
#include "base/json.h"
#include "kernels/dispatch.h"

namespace weft {
namespace {

constexpr const char* kFooter =
    "\nTry:\n"
    "  weft run -m DIR -p \"Once upon a time\" -n 64    continue a text\n"
    "  weft chat -m DIR                               talk to a model\n"
    "  weft COMMAND --help                            the flags of a command\n";

// CLI11's own words for a wrong command are "A subcommand is required" and the like, which name nothing.
void check_command(const CLI::App& app, int argc, char** argv) {
  const std::string word = argc > 1 ? argv[1] : "";
  if (word.starts_with('-')) return;
  std::string names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (sub->get_name() == word) return;
    names += (names.empty() ? "" : ", ") + sub->get_name();
  }
  if (argc < 2) usage("no command given; commands: {} (see weft --help)", names);
  usage("no command \"{}\"; commands: {}", word, names);
}

// CLI11 shows every check and REQUIRED beside a flag; the type's name is enough, the text says the rest.
class PlainFormatter : public CLI::Formatter {
 public:
  PlainFormatter() { column_width(32); }
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string type = option->get_type_name();
    return option->get_type_size() == 0 ? "" : " " + type.substr(0, type.find(':'));
  }
  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    const std::string name = CLI::Formatter::make_option_name(option, positional);
    return name.substr(0, name.find('{'));  // --no-thinking{false}
  }
};

int say(int code, const std::string& message) {
  // One line, and one write, so that lines of several processes do not mix.
  const std::string line = "weft: " + printable(message, 4000) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  return code;
}

int parse_and_run(int argc, char** argv) {
  CLI::App app("weft: hybrid language models (KDA, DSA) on CPUs", "weft");
  app.set_version_flag("--version", std::string("weft ") + kVersion);
  app.set_help_flag("-h,--help", "Show this help");
  app.require_subcommand(1);
  app.formatter(std::make_shared<PlainFormatter>());
  // A later flag wins, so that a script's flags can be overridden by appending.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  for (auto add : {add_run, add_chat, add_ask, add_tokenize, add_inspect, add_plan, add_synth, add_quantize,
                   add_verify, add_eval, add_bench, add_isa, add_cache})
    add(app);
  app.footer(kFooter);  // after them: they would inherit it
  try {
    check_command(app, argc, argv);
    app.parse(argc, argv);
    return kExitDone;
  } catch (const CLI::CallForHelp&) {
    const auto chosen = app.get_subcommands();
    std::fputs((chosen.empty() ? app.help() : chosen[0]->help("weft")).c_str(), stdout);
    return kExitDone;
  } catch (const CLI::CallForVersion& version) {
    std::puts(version.what());
    return kExitDone;
  } catch (const CLI::ParseError& error) {
    const std::string command = argc > 1 && argv[1][0] != '-' ? std::string(argv[1]) + " " : "";
    return say(kExitUsage, fmt::format("{} (see weft {}--help)", error.what(), command));
  } catch (const ExitCode& exit) {
    return exit.code;
  } catch (const UsageError& error) {
    return say(kExitUsage, error.what());
  } catch (const std::bad_alloc&) {
    return say(kExitFailed, "out of memory");
  } catch (const std::exception& error) {
    return say(kExitFailed, error.what());
  }
}

}  // namespace

void add_model_flag(CLI::App& sub, CommonFlags& flags, bool positional) {
  sub.add_option(positional ? "-m,--model,model" : "-m,--model", flags.model,
                 "Model folder, or the root of a download cache entry")
      ->type_name("DIR")
      ->required();
}

void add_engine_flags(CLI::App& sub, CommonFlags& flags, bool positional) {
  add_model_flag(sub, flags, positional);
  sub.add_option("-t,--threads", flags.threads, "Threads (default: the CPUs this process may use)")
      ->type_name("N")
      ->check(CLI::Range(1, 4096));
  sub.add_option("--cpu-list", flags.cpu_list, "CPUs to use, each thread pinned to one, as in 0-3,8 (default: all)")
      ->type_name("LIST");
  sub.add_option("--numa", flags.numa,
                 "Memory on machines of several nodes: local to who touches it first, or interleave (default: as the "
                 "system is set)")
      ->type_name("POLICY")
      ->check(CLI::IsMember({"local", "interleave"}));
  sub.add_option("-c,--ctx-size", flags.context,
                 fmt::format("Context in tokens (default: the model's, at most {})", kDefaultContext))
      ->type_name("N")
      ->check(CLI::NonNegativeNumber);
  sub.add_option("-b,--chunk", flags.chunk, "Prompt tokens read in one step (default: 512)")
      ->type_name("N")
      ->check(CLI::Range(1, 65536));
  sub.add_option("--isa", flags.isa, "Instruction set: portable, avx2, avx512, amx (default: the best here)")
      ->type_name("NAME");
  sub.add_option("--mla", flags.mla, "How MLA reads prompts: auto (default), absorbed, expanded")
      ->type_name("FORM")
      ->check(CLI::IsMember({"auto", "absorbed", "expanded"}));
  sub.add_option("--exec", flags.exec, "How a step runs: super (default), streams, ops")
      ->type_name("MODE")
      ->check(CLI::IsMember({"super", "streams", "ops"}));
  add_dsa_flag(sub, flags.dsa);
  sub.add_option(
         "--tier", flags.tier,
         "Formats of the parts: bf16 (default: as the checkpoint stores them), int8-experts, fp8-experts, "
         "mxfp8-experts, fp4-experts, or a file")
      ->type_name("NAME");
  sub.add_option("--index-cache", flags.index_cache, "Indexer keys stored as bf16 (default), mxfp8 or int8")
      ->type_name("FORMAT")
      ->check(CLI::IsMember({"bf16", "mxfp8", "int8"}));
  sub.add_option("--latent-cache", flags.latent_cache, "MLA's latent rows stored as bf16 (default) or fp8")
      ->type_name("FORMAT")
      ->check(CLI::IsMember({"bf16", "fp8"}));
  sub.add_option("--cache-dir", flags.cache_dir, "Where packed weights are kept between starts (default: ~/.cache/weft)")
      ->type_name("DIR");
  sub.add_flag("!--no-cache", flags.cache, "Neither read nor keep packed weights");
  sub.add_flag("!--no-memory-check", flags.check_memory,
               "Load even if the plan exceeds the memory available");
}

void add_dsa_flag(CLI::App& sub, std::string& mode) {
  sub.add_option("--dsa", mode,
                 "What DSA layers attend to: sparse (what the indexer selects, default), dense (everything), "
                 "recent (the most recent tokens, as many as sparse takes)")
      ->type_name("MODE")
      ->check(CLI::IsMember({"sparse", "dense", "recent"}));
}

DsaMode dsa_mode(const std::string& word) {
  return word == "dense" ? DsaMode::dense : word == "recent" ? DsaMode::recent : DsaMode::sparse;
}

EngineOptions engine_options(const CommonFlags& flags) {
  // Before any thread or large memory of this process.
  if (!flags.cpu_list.empty()) use_cpus(flags.cpu_list);
  if (!flags.numa.empty())
    if (const std::string note = place_memory(flags.numa == "local" ? Numa::local : Numa::interleave); !note.empty())
      fmt::print(stderr, "weft: {}\n", note);
  EngineOptions options;
  options.pin = !flags.cpu_list.empty();
  options.model = flags.model;
  options.isa = flags.isa;
  options.threads = flags.threads;
  options.context = flags.context;
  options.chunk = flags.chunk;
  options.mla = flags.mla == "absorbed"   ? MlaForm::absorbed
                : flags.mla == "expanded" ? MlaForm::expanded
                                          : MlaForm::automatic;
  options.exec = exec_mode(flags.exec);
  options.dsa = dsa_mode(flags.dsa);
  options.tier = read_tier(flags.tier);
  // "bf16" is what the instruction set multiplies: f32 where it has no bf16 product.
  options.index_cache = flags.index_cache == "mxfp8"  ? IndexFormat::mxfp8
                        : flags.index_cache == "int8" ? IndexFormat::int8
                                                      : IndexFormat::operand;
  options.latent_cache = flags.latent_cache == "fp8" ? LatentFormat::fp8 : LatentFormat::operand;
  options.trace = !flags.trace.empty();
  if (flags.cache) options.cache.folder = flags.cache_dir.empty() ? PackCache::default_folder() : flags.cache_dir;
  options.cache.warn = [](const std::string& line) { fmt::print(stderr, "weft: warning: {}\n", line); };
  options.cache.note = [](const std::string& line) { fmt::print(stderr, "weft: {}\n", line); };
  options.check_memory = flags.check_memory;
  return options;
}

void add_isa(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("isa", "Show which instruction sets this machine runs, and why");
  sub->callback([] {
    std::printf("%s\n%s", cpu_name().c_str(), explain_isas(cpu_features()).c_str());
    std::printf("%s\n", default_threads().reason.c_str());
  });
}

int run_cli(int argc, char** argv) {
  // A descriptor that the caller closed would go to the next file opened, a checkpoint's shard for instance.
  // Read-only for all three: input is at its end, and output to nowhere is still an error.
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);
  int code = parse_and_run(argc, argv);
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  if ((!flushed || std::ferror(stdout)) && code == kExitDone)
    code = say(kExitFailed,
               fmt::format("cannot write to stdout: {}", errno ? std::strerror(errno) : "write error"));
  return code;
}

}  // namespace weft
