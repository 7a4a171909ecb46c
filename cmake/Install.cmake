# What `cmake --install` lays down: library, headers, command, the CMake package `flashdsa` with the
# target flashdsa::flashdsa, and flashdsa.pc. Every path in them is relative to the place where they
# lie, so that the tree may be moved and `cmake --install --prefix` works.

include(CMakePackageConfigHelpers)

set(FLASHDSA_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/flashdsa)

install(TARGETS flashdsa EXPORT flashdsa-targets)
install(EXPORT flashdsa-targets NAMESPACE flashdsa:: DESTINATION ${FLASHDSA_CMAKE_DIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flashdsa DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

get_target_property(FLASHDSA_LIBRARY_TYPE flashdsa TYPE)
configure_package_config_file(cmake/flashdsa-config.cmake.in flashdsa-config.cmake
                              INSTALL_DESTINATION ${FLASHDSA_CMAKE_DIR})
write_basic_package_version_file(flashdsa-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flashdsa-config.cmake
              ${PROJECT_BINARY_DIR}/flashdsa-config-version.cmake
        DESTINATION ${FLASHDSA_CMAKE_DIR})

# pkg-config. Where only the static library is installed, plain `pkg-config --libs` has to name what
# it needs as well.
list(TRANSFORM OpenMP_CXX_LIB_NAMES PREPEND " -l" OUTPUT_VARIABLE static_libs)
if(FLASHDSA_CUDA)
  list(APPEND static_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
endif()
list(JOIN static_libs "" FLASHDSA_PC_STATIC_LIBS)
if(FLASHDSA_LIBRARY_TYPE STREQUAL STATIC_LIBRARY)
  set(FLASHDSA_PC_LIBS "${FLASHDSA_PC_STATIC_LIBS}")
endif()
file(RELATIVE_PATH FLASHDSA_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" FLASHDSA_PC_PREFIX "${FLASHDSA_PC_PREFIX}")
configure_file(cmake/flashdsa.pc.in flashdsa.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flashdsa.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(FLASHDSA_TOOLS)
  install(TARGETS flashdsa_command)
endif()
