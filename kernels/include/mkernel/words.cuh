// Integers by their bits, and the memory of an agent.
#pragma once

namespace mk {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void*) == 8, "a 64-bit platform");

struct Scratch {
    u8* data;
    u64 bytes;
};

}  // namespace mk
