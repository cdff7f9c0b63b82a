// What a container or a systemd scope allows: CPU quota and memory limit from cgroup v2 or v1 files.
//
// A program that counts the host's cores inside a quota of one CPU starts too many spinning threads and is
// throttled for whole periods (many times slower, without a message), so the defaults must come from here.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace weft {

// Reads a small text file; nullopt when it cannot be read. Tests feed their own.
using ReadText = std::function<std::optional<std::string>(const std::string& path)>;
std::optional<std::string> read_text(const std::string& path);

// CPUs per second from v2's "cpu.max" ("150000 100000" -> 1.5) or v1's two files. nullopt: no limit, or text
// that is no limit we understand ("max 100000", "-1", "0 0", garbage).
std::optional<double> parse_cpu_max(std::string_view text);
std::optional<double> parse_cpu_cfs(std::string_view quota_us, std::string_view period_us);

// Smallest quota of this process's group and the groups above it; nullopt: none.
std::optional<double> cpu_quota(const ReadText& read = read_text);

// Bytes that may still be used under the tightest memory limit (limit - usage + reclaimable file cache);
// nullopt: none.
std::optional<uint64_t> cgroup_memory_left(const ReadText& read = read_text);

}  // namespace weft
