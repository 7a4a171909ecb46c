# The command: its parts as C++ tests, the program itself from Python.

file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*_test.cc)
add_executable(cli_tests ${sources})
target_link_libraries(cli_tests PRIVATE flashdsa_tools flashdsa_warnings GTest::gtest_main)
gtest_discover_tests(cli_tests TEST_PREFIX cli. DISCOVERY_TIMEOUT 120)

set(Python3_FIND_UNVERSIONED_NAMES FIRST)  # the python3 of the PATH
find_package(Python3 REQUIRED COMPONENTS Interpreter)
file(GLOB programs CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_LIST_DIR}
     ${CMAKE_CURRENT_LIST_DIR}/test_*.py)
foreach(program IN LISTS programs)
  string(REGEX REPLACE "^test_(.*)\\.py$" "\\1" name ${program})
  add_test(NAME cli.command.${name}
           COMMAND Python3::Interpreter -m unittest -v test_${name}
           WORKING_DIRECTORY ${CMAKE_CURRENT_LIST_DIR})
  set_tests_properties(cli.command.${name} PROPERTIES TIMEOUT 3600 ENVIRONMENT
    "FLASHDSA_BIN=$<TARGET_FILE:flashdsa_command>;FLASHDSA_CHECK=;FLASHDSA_SANITIZE=${FLASHDSA_SANITIZE}")
endforeach()
