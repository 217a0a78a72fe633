/* Connects six times and prints the server's answers. Before that it requests an io_uring and installs seccomp filters of its own. */
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int count, char **words)
{
	char room[256] = {0};
	if (syscall(SYS_io_uring_setup, 8, room) < 0)
		perror("io_uring_setup");
	struct sock_filter allow = {.code = BPF_RET | BPF_K, .k = SECCOMP_RET_ALLOW};
	struct sock_fprog program = {.len = 1, .filter = &allow};
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program) < 0)
		perror("listener");
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0)
		perror("filter");
	struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons(8080)};
	inet_pton(AF_INET, count > 1 ? words[1] : "127.0.0.1", &server.sin_addr);
	for (int i = 0; i < 6; i++) {
		int fd = socket(AF_INET, SOCK_STREAM, 0);
		if (connect(fd, (struct sockaddr *)&server, sizeof server) < 0)
			perror("connect");
		ssize_t length = read(fd, room, sizeof room);
		printf("%.*s\n", length > 0 ? (int)length : 0, room);
		close(fd);
	}
	return 0;
}
