"""What the GPU backends share: argument structs, the mask program on the device, tile operations, compiling and launching."""
