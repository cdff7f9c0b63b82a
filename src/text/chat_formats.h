// The formats, one file each; chat_format() finds them by name.
#pragma once

#include "text/chat.h"

namespace weft {

const ChatFormat& kimi_k3_format();
const ChatFormat& kimi_linear_format();
const ChatFormat& glm5_format();
const ChatFormat& deepseek_v32_format();

}  // namespace weft
