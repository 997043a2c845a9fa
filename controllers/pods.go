package controllers

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	appsac "k8s.io/client-go/applyconfigurations/apps/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/controllers/plan"
	"flashsale.dev/operator/reserver/keys"
)

const (
	apiPort, adminPort = 8080, 9090
	secretPath         = "/etc/flashsale/database"
	webhookPath        = "/etc/flashsale/webhook"
	keysPath           = "/etc/flashsale/keys"
)

func (s *scope) reserver() runtime.ApplyConfiguration {
	resources := s.sale.Spec.Reserver.Resources
	if resources == nil {
		resources = &corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
			Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
		}
	}
	container := s.container("serve", *resources).
		WithArgs("serve", fmt.Sprintf("--listen=:%d", apiPort), fmt.Sprintf("--admin=:%d", adminPort), "--keys="+keysPath+"/"+keys.FileName).
		WithArgs(admissionArgs(s.sale.Spec.Admission)...).
		WithPorts(corev1ac.ContainerPort().WithName("http").WithContainerPort(apiPort).WithProtocol(corev1.ProtocolTCP)).
		WithVolumeMounts(corev1ac.VolumeMount().WithName("keys").WithMountPath(keysPath).WithReadOnly(true))
	if limit := resources.Limits.Memory().Value(); limit > 0 {
		// Go collects garbage harder before the kernel ends the process.
		container.WithEnv(corev1ac.EnvVar().WithName("GOMEMLIMIT").WithValue(strconv.FormatInt(limit-limit/10, 10)))
	}
	d := s.deployment(reserverName(s.sale), "reserver", container)
	// Pods read the keys again when they change: the template says nothing of their content, so that none is replaced.
	d.Spec.Template.Spec.WithVolumes(corev1ac.Volume().WithName("keys").
		WithSecret(corev1ac.SecretVolumeSource().WithSecretName(keysName(s.sale)).WithDefaultMode(0o440)))
	if s.sale.Spec.Reserver.Autoscaling == nil { // else the autoscaler's
		d.Spec.WithReplicas(s.sale.Spec.Reserver.Replicas)
	}
	for _, key := range s.sale.Spec.Reserver.Pod.TopologySpread {
		d.Spec.Template.Spec.WithTopologySpreadConstraints(corev1ac.TopologySpreadConstraint().WithMaxSkew(1).WithTopologyKey(key).
			WithWhenUnsatisfiable(corev1.ScheduleAnyway).WithLabelSelector(metav1ac.LabelSelector().WithMatchLabels(s.selector("reserver"))))
	}
	return d
}

// admissionArgs say who buyers are, and how often they may ask.
func admissionArgs(a sales.AdmissionSpec) []string {
	args := []string{"--buyer-header=" + a.BuyerHeader, fmt.Sprintf("--max-in-flight=%d", a.MaxInFlight)}
	if len(a.TrustedProxies) > 0 {
		args = append(args, "--trusted-proxies="+strings.Join(a.TrustedProxies, ","))
	}
	if a.JWT != nil {
		args = append(args, "--jwt-issuer="+a.JWT.Issuer, "--jwt-audience="+a.JWT.Audience, "--jwt-jwks="+a.JWT.JWKSURL,
			"--jwt-buyer-claim="+a.JWT.BuyerClaim, "--jwt-leeway="+a.JWT.Leeway.Duration.String())
	}
	buyer, address := a.RateLimits.Buyer, a.RateLimits.Address
	if buyer.PerSecond != nil { // always, of what the API server gave
		args = append(args, fmt.Sprintf("--buyer-rate=%d", *buyer.PerSecond))
	}
	return append(args, fmt.Sprintf("--buyer-burst=%d", buyer.Burst),
		fmt.Sprintf("--address-rate=%d", address.PerSecond), fmt.Sprintf("--address-burst=%d", address.Burst))
}

func (s *scope) sweeper() runtime.ApplyConfiguration {
	container := s.container("sweep", corev1.ResourceRequirements{
		Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("32Mi")},
		Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("128Mi")},
	}).WithArgs("sweep", fmt.Sprintf("--admin=:%d", adminPort),
		"--interval="+s.sale.Spec.Sweep.Interval.Duration.String(), "--batch-size="+strconv.Itoa(int(s.sale.Spec.Sweep.BatchSize)))
	webhook := s.sale.Spec.Webhook
	if webhook != nil {
		container.WithArgs("--webhook-url="+webhook.URL, "--webhook-secret="+webhookPath+"/secret").
			WithVolumeMounts(corev1ac.VolumeMount().WithName("webhook").WithMountPath(webhookPath).WithReadOnly(true))
	}
	deployment := s.deployment(sweeperName(s.sale), "sweeper", container)
	deployment.Spec.WithReplicas(1)
	if webhook != nil {
		// Optional: without the key no event goes out, but holds are swept.
		deployment.Spec.Template.Spec.WithVolumes(corev1ac.Volume().WithName("webhook").
			WithSecret(corev1ac.SecretVolumeSource().WithSecretName(webhook.SecretRef.Name).WithDefaultMode(0o440).WithOptional(true)))
	}
	return deployment
}

// container is what both Deployments have in common. The database's credentials are mounted, never passed.
func (s *scope) container(name string, resources corev1.ResourceRequirements) *corev1ac.ContainerApplyConfiguration {
	image := s.sale.Spec.Reserver.Image
	if image == "" {
		image = s.Image
	}
	return corev1ac.Container().WithName(name).WithImage(image).WithImagePullPolicy(corev1.PullIfNotPresent).
		WithCommand("/reserver").
		WithEnv(corev1ac.EnvVar().WithName("FLASHSALE_SALE_ID").WithValue(string(s.sale.UID)),
			corev1ac.EnvVar().WithName("FLASHSALE_DATABASE").WithValue(secretPath)).
		WithPorts(corev1ac.ContainerPort().WithName("admin").WithContainerPort(adminPort).WithProtocol(corev1.ProtocolTCP)).
		WithReadinessProbe(probe("/readyz").WithPeriodSeconds(1).WithTimeoutSeconds(2)).
		WithLivenessProbe(probe("/healthz").WithPeriodSeconds(10).WithTimeoutSeconds(5).WithFailureThreshold(6)).
		WithResources(corev1ac.ResourceRequirements().WithRequests(resources.Requests).WithLimits(resources.Limits)).
		WithVolumeMounts(corev1ac.VolumeMount().WithName("database").WithMountPath(secretPath).WithReadOnly(true)).
		WithSecurityContext(corev1ac.SecurityContext().
			WithAllowPrivilegeEscalation(false).WithReadOnlyRootFilesystem(true).
			WithCapabilities(corev1ac.Capabilities().WithDrop("ALL")))
}

func probe(path string) *corev1ac.ProbeApplyConfiguration {
	return corev1ac.Probe().WithHTTPGet(corev1ac.HTTPGetAction().WithPath(path).WithPort(intstr.FromString("admin")))
}

func (s *scope) deployment(name, component string, container *corev1ac.ContainerApplyConfiguration) *appsac.DeploymentApplyConfiguration {
	overrides := s.sale.Spec.Reserver.Pod
	template := corev1ac.PodTemplateSpec().WithLabels(overrides.Labels).WithLabels(s.labels(component)).WithAnnotations(overrides.Annotations)
	if s.database != nil {
		// Pods read the Secret when they start: a new content replaces them, one by one.
		template.WithAnnotations(map[string]string{"sales.flashsale.dev/database": s.database.fingerprint(s.sale.UID)})
	}
	pod := corev1ac.PodSpec().
		WithContainers(container).
		WithAutomountServiceAccountToken(false).
		WithEnableServiceLinks(false).
		WithTerminationGracePeriodSeconds(30).
		WithNodeSelector(overrides.NodeSelector).
		WithSecurityContext(corev1ac.PodSecurityContext().
			WithRunAsNonRoot(true).WithRunAsUser(65532).WithRunAsGroup(65532).WithFSGroup(65532).
			WithSeccompProfile(corev1ac.SeccompProfile().WithType(corev1.SeccompProfileTypeRuntimeDefault))).
		WithVolumes(corev1ac.Volume().WithName("database").
			WithSecret(corev1ac.SecretVolumeSource().WithSecretName(s.sale.Spec.Database.SecretRef.Name).WithDefaultMode(0o440)))
	if overrides.PriorityClassName != "" {
		pod.WithPriorityClassName(overrides.PriorityClassName)
	}
	for _, secret := range overrides.ImagePullSecrets {
		pod.WithImagePullSecrets(corev1ac.LocalObjectReference().WithName(secret.Name))
	}
	for _, t := range overrides.Tolerations {
		pod.WithTolerations(applied[corev1ac.TolerationApplyConfiguration](t))
	}
	if overrides.Affinity != nil {
		pod.WithAffinity(applied[corev1ac.AffinityApplyConfiguration](overrides.Affinity))
	}
	return appsac.Deployment(name, s.sale.Namespace).
		WithLabels(s.labels(component)).
		WithSpec(appsac.DeploymentSpec().
			WithRevisionHistoryLimit(2).
			WithSelector(metav1ac.LabelSelector().WithMatchLabels(s.selector(component))).
			WithStrategy(appsac.DeploymentStrategy().WithType(appsv1.RollingUpdateDeploymentStrategyType).
				WithRollingUpdate(appsac.RollingUpdateDeployment().WithMaxUnavailable(intstr.FromInt32(0)).WithMaxSurge(intstr.FromInt32(1)))).
			WithTemplate(template.WithSpec(pod)))
}

// applied gives an API type as its apply configuration, which has the same fields.
func applied[A any](from any) *A {
	to := new(A)
	text, err := json.Marshal(from)
	if err == nil {
		err = json.Unmarshal(text, to)
	}
	if err != nil {
		panic(err) // what the API server stored can be encoded
	}
	return to
}

// pods counts the pods of a Deployment of the sale.
func (s *scope) pods(ctx context.Context, name string) (plan.Pods, *appsv1.Deployment) {
	d := &appsv1.Deployment{}
	// From the cache, which knows the controller's own objects only: what is not there has no pods of ours.
	if err := s.Get(ctx, client.ObjectKey{Namespace: s.sale.Namespace, Name: name}, d); err != nil || !ours(d, s.sale) {
		return plan.Pods{}, nil
	}
	pods := plan.Pods{Ready: d.Status.ReadyReplicas}
	if d.Spec.Replicas != nil {
		pods.Desired = *d.Spec.Replicas
	}
	return pods, d
}

const quotaExceeded = "exceeded quota" // in the messages of the API server's quota admission

// podFault says why the Deployment's pods are not ready, nil when the cluster does not tell.
func (s *scope) podFault(ctx context.Context, d *appsv1.Deployment) *plan.Fault {
	for _, c := range d.Status.Conditions {
		if c.Type == appsv1.DeploymentReplicaFailure && c.Status == corev1.ConditionTrue {
			if strings.Contains(c.Message, quotaExceeded) {
				return &plan.Fault{Reason: sales.ReasonQuotaExceeded, Message: c.Message}
			}
			return &plan.Fault{Reason: sales.ReasonPodsRefused, Message: c.Message, Person: true}
		}
	}
	pods := &corev1.PodList{}
	if err := s.List(ctx, pods, client.InNamespace(d.Namespace), client.MatchingLabels(d.Spec.Selector.MatchLabels)); err != nil {
		return nil
	}
	before := meta.FindStatusCondition(s.sale.Status.Conditions, sales.ConditionReserversAvailable)
	var first *plan.Fault
	for i := range pods.Items {
		pod := &pods.Items[i]
		if podReady(pod) {
			continue
		}
		f := faultOfPod(pod)
		if f != nil {
			f.Message = pod.Name + ": " + f.Message
		}
		// A pod that tries again looks like a new one for a moment, and each try fails in other words: what was said of it stays.
		if before != nil && (f == nil || f.Reason == before.Reason) {
			if _, rest, found := strings.Cut(before.Message, pod.Name+": "); found {
				return &plan.Fault{Reason: before.Reason, Message: pod.Name + ": " + rest, Person: f != nil && f.Person}
			}
		}
		if first == nil {
			first = f
		}
	}
	return first
}

func podReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// faultOfPod names what keeps a pod from being ready.
func faultOfPod(pod *corev1.Pod) *plan.Fault {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			return &plan.Fault{Reason: sales.ReasonUnschedulable, Message: c.Message}
		}
	}
	for _, c := range pod.Status.ContainerStatuses {
		waiting := c.State.Waiting
		if waiting == nil {
			continue
		}
		detail := waiting.Message
		switch waiting.Reason {
		case "ErrImagePull", "ImagePullBackOff":
			if _, cause, found := strings.Cut(detail, "ErrImagePull: "); found {
				detail = cause
			}
			return &plan.Fault{Reason: sales.ReasonImageUnavailable, Message: fmt.Sprintf("image %s cannot be pulled: %s", c.Image, detail)}
		case "InvalidImageName", "ErrImageNeverPull":
			return &plan.Fault{Reason: sales.ReasonImageUnavailable, Message: fmt.Sprintf("image %s: %s", c.Image, detail), Person: true}
		case "CrashLoopBackOff":
			if last := c.LastTerminationState.Terminated; last != nil {
				detail = fmt.Sprintf("it ended with exit code %d, %s", last.ExitCode, last.Reason)
			}
			return &plan.Fault{Reason: sales.ReasonPodsFailing, Message: fmt.Sprintf("container %s does not stay up: %s", c.Name, detail)}
		case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
			return &plan.Fault{Reason: sales.ReasonPodsFailing, Message: fmt.Sprintf("container %s does not start: %s", c.Name, detail)}
		}
	}
	return nil
}
