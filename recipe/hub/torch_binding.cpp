// Importing the module loads the library, which registers the kernels; Python defines the operations.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
