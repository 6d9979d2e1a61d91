// Memory that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace radixserve {

class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

    // Return room for so many floats, on a border of a cache line. It ends what an earlier call returned.
    float* floats(int64_t count) {
        if (count > size_) {
            std::free(memory_);
            const int64_t line = 64;
            memory_ = std::aligned_alloc(line, (count * sizeof(float) + line - 1) / line * line);
            size_ = memory_ == nullptr ? 0 : count;
            if (memory_ == nullptr) throw std::bad_alloc();
        }
        return static_cast<float*>(memory_);
    }

private:
    void* memory_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace radixserve
