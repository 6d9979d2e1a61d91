// What may be called on any CPU: this file is not compiled for more than the platform's own instructions.
#include "radixserve_cpu.h"

int32_t radixserve_abi_version() { return 3; }

int32_t radixserve_is_supported() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
